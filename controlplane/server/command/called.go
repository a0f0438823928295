package command

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

// AsKctl is the program name with which 'kctl cluster' runs this program for commands that work on
// a data directory. Help and errors then contain the kctl command that the user has typed.
const AsKctl = "kctl cluster"

const programName = "keelson-controlplane"

// useProgramName makes the help of root and its subcommands show the program name AsKctl, if name
// is AsKctl. Otherwise it changes nothing. It returns root.
func useProgramName(root *cobra.Command, name string) *cobra.Command {
	if name != AsKctl {
		return root
	}
	root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: AsKctl}
	var rename func(c *cobra.Command)
	rename = func(c *cobra.Command) {
		c.Example = strings.ReplaceAll(c.Example, programName+" ", AsKctl+" ")
		for _, below := range c.Commands() {
			rename(below)
		}
	}
	rename(root)
	return root
}

// Failure returns the message that the program prints for the error of a command. The message
// starts with the name with which the program was called.
func Failure(c *cobra.Command, err error) string {
	if os.Args[0] == AsKctl && c != nil {
		return fmt.Sprintf("%s: %v", c.CommandPath(), err)
	}
	return fmt.Sprintf("%s: %v", programName, err)
}

// withPreviousName gives the command c its previous name and hides it from help. A renamed command
// is registered a second time with this name, so that the previous name works for one more release.
func withPreviousName(c *cobra.Command, name string) *cobra.Command {
	current := c.Name()
	c.Use = name + strings.TrimPrefix(c.Use, current)
	c.Example = strings.ReplaceAll(c.Example, " "+current, " "+name)
	c.Hidden = true
	return c
}

// requireSubcommand makes c a command that only has subcommands. Without arguments it prints its
// help, and an unknown subcommand is an error. By default, cobra prints the help for an unknown
// subcommand, and the program exits with 0.
func requireSubcommand(c *cobra.Command) *cobra.Command {
	c.Args = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return fmt.Errorf("there is no command %q: '%s --help' lists them", args[0], c.CommandPath())
	}
	c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	return c
}
