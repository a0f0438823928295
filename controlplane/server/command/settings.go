package command

import (
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"keelson.dev/keelson/internal/settings"
)

// DefaultConfig is the file that is read where --config names none, if it is there.
const DefaultConfig = "/etc/keelson/controlplane.yaml"

// lasting are the verbs whose flags are keys of the file. init and join take what is theirs of it, which counts at that time alone.
var lasting = []string{"run", "init", "join"}

// configured gives every verb what the environment and the file say. Other verbs than the lasting ones take what they share with run.
func configured(root *cobra.Command) {
	root.PersistentFlags().String("config", DefaultConfig, "configuration file with lines of 'key: value'; the default file may be missing; '' reads no file")
	keys := keysOf(root)
	for _, c := range all(root) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if takes(keys, c, f.Name) {
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
		any := false
		for _, k := range keys {
			f := settings.Flag{Name: k.name, Kind: k.kind}
			if takes(keys, c, k.name) {
				any = true
				f.OnCommandLine = c.Flags().Changed(k.name)
				f.Set = func(s string) error { return c.Flags().Set(k.name, s) }
			}
			flags = append(flags, f)
		}
		if !any {
			return nil
		}
		return settings.Apply(flags, settings.File{Path: path, Required: c.Flags().Changed("config")}, settings.FromEnvironment)
	}
}

// key is one of the file's.
type key struct {
	name  string
	kind  settings.Kind
	ofRun bool
}

func keysOf(root *cobra.Command) []key {
	var keys []key
	for _, verb := range lasting {
		for _, c := range root.Commands() {
			if c.Name() != verb {
				continue
			}
			c.Flags().VisitAll(func(f *pflag.Flag) {
				if f.Name == "output" || slices.ContainsFunc(keys, func(k key) bool { return k.name == f.Name }) {
					return
				}
				keys = append(keys, key{f.Name, kindOf(f), verb == "run"})
			})
		}
	}
	return keys
}

// takes says whether a verb takes a key of the file or its name in the environment.
func takes(keys []key, c *cobra.Command, name string) bool {
	return c.Flags().Lookup(name) != nil && slices.ContainsFunc(keys, func(k key) bool {
		return k.name == name && (k.ofRun || slices.Contains(lasting, c.Name()))
	})
}

func kindOf(f *pflag.Flag) settings.Kind {
	switch f.Value.Type() {
	case "bool":
		return settings.Bool
	case "int", "int32", "int64", "uint", "uint16", "uint32", "uint64":
		return settings.Integer
	case "stringSlice", "stringArray", "stringToString":
		return settings.List
	}
	return settings.Text
}

// all are the commands of a tree.
func all(c *cobra.Command) []*cobra.Command {
	out := []*cobra.Command{c}
	for _, below := range c.Commands() {
		out = append(out, all(below)...)
	}
	return out
}
