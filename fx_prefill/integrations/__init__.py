"""What is known of other libraries, by name: none of them is imported from here."""
