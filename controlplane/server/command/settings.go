package command

import (
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"keelson.dev/keelson/internal/settings"
)

// DefaultConfig is the path of the configuration file that is read without --config, if it exists.
const DefaultConfig = "/etc/keelson/controlplane.yaml"

// settingsVerbs are the commands with the flags that define the keys of the configuration file.
// Every other command reads only the keys that it shares with run, and ignores the keys of init and
// join.
var settingsVerbs = []string{"run", "init", "join"}

// applySettings makes every command read its settings from the environment and the configuration
// file. Commands that are not in settingsVerbs accept only the keys that they share with run.
func applySettings(root *cobra.Command) {
	root.PersistentFlags().String("config", DefaultConfig,
		"configuration file with lines of 'key: value'; the default file may be missing; '' reads no file")
	keys := settingsKeys(root)
	for _, c := range listCommands(root) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if acceptsKey(keys, c, f.Name) {
				f.Usage = settings.Usage(f.Name, f.Usage)
			}
		})
	}
	root.PersistentPreRunE = func(c *cobra.Command, _ []string) error {
		path, err := c.Flags().GetString("config")
		if err != nil {
			return err
		}
		var flags []settings.Flag
		accepted := false
		for _, k := range keys {
			f := settings.Flag{Name: k.name, Kind: k.kind}
			if acceptsKey(keys, c, k.name) {
				accepted = true
				f.OnCommandLine = c.Flags().Changed(k.name)
				f.Set = func(s string) error { return c.Flags().Set(k.name, s) }
			}
			flags = append(flags, f)
		}
		if !accepted {
			return nil
		}
		return settings.Apply(flags, settings.File{Path: path, Required: c.Flags().Changed("config")},
			settings.FromEnvironment)
	}
}

// key is a key of the configuration file. It has the name of a flag.
type key struct {
	name  string
	kind  settings.Kind
	ofRun bool
}

func settingsKeys(root *cobra.Command) []key {
	var keys []key
	for _, verb := range settingsVerbs {
		for _, c := range root.Commands() {
			if c.Name() != verb {
				continue
			}
			c.Flags().VisitAll(func(f *pflag.Flag) {
				if f.Name == "output" || slices.ContainsFunc(keys, func(k key) bool { return k.name == f.Name }) {
					return
				}
				keys = append(keys, key{f.Name, settings.KindOf(f.Value.Type()), verb == "run"})
			})
		}
	}
	return keys
}

// acceptsKey reports whether the command c reads the setting with the given name from the
// configuration file or the environment. keys are all settings.
func acceptsKey(keys []key, c *cobra.Command, name string) bool {
	return c.Flags().Lookup(name) != nil && slices.ContainsFunc(keys, func(k key) bool {
		return k.name == name && (k.ofRun || slices.Contains(settingsVerbs, c.Name()))
	})
}

// listCommands returns c and all its subcommands, recursively.
func listCommands(c *cobra.Command) []*cobra.Command {
	out := []*cobra.Command{c}
	for _, below := range c.Commands() {
		out = append(out, listCommands(below)...)
	}
	return out
}
