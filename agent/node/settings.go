package node

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"keelson.dev/keelson/internal/settings"
)

// DefaultConfig is the path of the configuration file that is read if the flag --config is not set.
// It may be missing.
const DefaultConfig = "/etc/keelson/agent.yaml"

// flagKinds are the types, in the configuration file, of the flags with values other than single
// strings.
var flagKinds = map[string]settings.Kind{
	"server": settings.List, "node-ip": settings.List, "insecure-registry": settings.List,
	"registry-mirror":    settings.List,
	"nodeport-addresses": settings.List, "source-check-exempt-namespaces": settings.List, "cluster-dns": settings.List,
	"runtime-handler": settings.List,
	"capacity":        settings.JoinedList, "node-labels": settings.JoinedList, "taints": settings.JoinedList,
	"wireguard-port": settings.Integer, "kubelet-port": settings.Integer,
}

// WithConfigFile declares the flag --config on fs. It must be called after Flags, because it
// extends the help of each flag by its environment variable and its key in the configuration file.
// apply must be called after the flags are parsed. It sets the flags that are not on the command
// line from the environment and the configuration file.
func WithConfigFile(fs *pflag.FlagSet) (apply func() error) {
	fs.VisitAll(func(f *pflag.Flag) { f.Usage = settings.Usage(f.Name, f.Usage) })
	file := settings.File{Path: DefaultConfig}
	declareFlag(fs, "config", "configuration file with lines of 'key: value'; the default file may be missing; '' "+
		"reads no file (default "+
		DefaultConfig+
		")", func(s string) error {
		file = settings.File{Path: s, Required: true}
		return nil
	})
	return func() error {
		return settings.Apply(settingsOf(fs), file, settings.FromEnvironment)
	}
}

// settingsOf returns the settings for the flags of a parsed flag set, except --config.
func settingsOf(fs *pflag.FlagSet) []settings.Flag {
	var all []settings.Flag
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Name == "config" {
			return
		}
		kind, ok := flagKinds[f.Name]
		if !ok {
			kind = settings.KindOf(f.Value.Type())
		}
		// Value.Set, unlike FlagSet.Set, adds no text about the command line to an error.
		all = append(all, settings.Flag{Name: f.Name, Kind: kind, OnCommandLine: f.Changed, Set: f.Value.Set})
	})
	return all
}

// recordedFlag is a pflag.Value that passes each value to a function. Unlike a flag of
// FlagSet.Func, it also records the values. Its default is empty.
type recordedFlag struct {
	set    func(string) error
	values []string
}

// declareFlag declares a flag on fs that calls set for each value and records the values.
func declareFlag(fs *pflag.FlagSet, name, usage string, set func(string) error) {
	fs.Var(&recordedFlag{set: set}, name, usage)
}

// Type implements pflag.Value.
func (s *recordedFlag) Type() string { return "value" }

// String returns the recorded values, separated by commas. It implements pflag.Value.
func (s *recordedFlag) String() string { return strings.Join(s.values, ",") }

// Set calls the flag's function with a value and records the value. It implements pflag.Value.
func (s *recordedFlag) Set(text string) error {
	if err := s.set(text); err != nil {
		return err
	}
	s.values = append(s.values, text)
	return nil
}

// FlagValues returns the values of all flags by name. A value "" means that the default is
// detected. The join token is hidden, because it is a secret.
func FlagValues(fs *pflag.FlagSet) map[string]string {
	out := map[string]string{}
	fs.VisitAll(func(f *pflag.Flag) { out[f.Name] = f.Value.String() })
	if out["token"] != "" {
		out["token"] = "(left out)"
	}
	return out
}

// settingsText returns the agent's settings for the node's API: the release first, then one line
// per flag.
func (c *Config) settingsText() []byte {
	var out bytes.Buffer
	fmt.Fprintf(&out, "release: %s\n", c.Release)
	for _, name := range slices.Sorted(maps.Keys(c.Diagnostics.Settings)) {
		fmt.Fprintf(&out, "%s: %s\n", name, c.Diagnostics.Settings[name])
	}
	return out.Bytes()
}
