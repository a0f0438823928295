package command

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

// AsKctl is the name under which 'kctl cluster' runs this program for the verbs that work on a machine's disk: help
// and errors then name kctl's verb, which is what the person has typed.
const AsKctl = "kctl cluster"

const programName = "keelson-controlplane"

// callAs makes the help of a command tree say the name under which it was called.
func callAs(root *cobra.Command, name string) *cobra.Command {
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

// Failure is the line in which a person reads the error of a command.
func Failure(c *cobra.Command, err error) string {
	if os.Args[0] == AsKctl && c != nil {
		return fmt.Sprintf("%s: %v", c.CommandPath(), err)
	}
	return fmt.Sprintf("%s: %v", programName, err)
}

// withPreviousName gives a command its previous name and hides it. Each renamed command has such a second command for one
// release.
func withPreviousName(c *cobra.Command, name string) *cobra.Command {
	current := c.Name()
	c.Use = name + strings.TrimPrefix(c.Use, current)
	c.Example = strings.ReplaceAll(c.Example, " "+current, " "+name)
	c.Hidden = true
	return c
}

// group makes a command that only holds others: alone it shows its help, and a word that is none of its commands is
// an error. Without this cobra shows the help for any word, and the program exits with 0.
func group(c *cobra.Command) *cobra.Command {
	c.Args = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return fmt.Errorf("there is no command %q: '%s --help' lists them", args[0], c.CommandPath())
	}
	c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	return c
}
