package node

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"

	"keelson.dev/keelson/internal/settings"
)

// DefaultConfig is the path of the configuration file that is read if the flag --config is not set.
// It may be missing.
const DefaultConfig = "/etc/keelson/agent.yaml"

// flagKinds are the kinds of the flags with values in the configuration file that are not single
// strings.
var flagKinds = map[string]settings.Kind{
	"server": settings.List, "node-ip": settings.List, "insecure-registry": settings.List, "registry-mirror": settings.List,
	"nodeport-addresses": settings.List, "source-check-exempt-namespaces": settings.List, "cluster-dns": settings.List, "runtime-handler": settings.List,
	"capacity": settings.JoinedList, "node-labels": settings.JoinedList, "taints": settings.JoinedList,
	"wireguard-port": settings.Integer, "kubelet-port": settings.Integer,
}

// WithConfigFile declares the flag --config on fs. It is called after Flags, and adds the
// environment variable and the key in the configuration file to each flag's help. apply is called
// after parsing. It sets the flags that are not on the command line from the environment and the
// configuration file.
func WithConfigFile(fs *flag.FlagSet) (apply func() error) {
	fs.VisitAll(func(f *flag.Flag) { f.Usage = settings.Usage(f.Name, f.Usage) })
	file := settings.File{Path: DefaultConfig}
	declareFlag(fs, "config", "configuration file with lines of 'key: value'; the default file may be missing; '' reads no file (default "+
		DefaultConfig+
		")", func(s string) error {
		file = settings.File{Path: s, Required: true}
		return nil
	})
	return func() error {
		return settings.Apply(settings.FromFlagSet(fs, flagKinds, "config"), file, settings.FromEnvironment)
	}
}

// recordedFlag is a flag.Value that calls a function for each value and records the values, unlike
// flag.Func. Its default is empty.
type recordedFlag struct {
	set    func(string) error
	values []string
}

// declareFlag declares a flag on fs that calls set for each value and records the values.
func declareFlag(fs *flag.FlagSet, name, usage string, set func(string) error) {
	fs.Var(&recordedFlag{set: set}, name, usage)
}

// String returns the recorded values, separated by commas. It implements flag.Value.
func (s *recordedFlag) String() string { return strings.Join(s.values, ",") }

// Set calls the flag's function with a value and records the value. It implements flag.Value.
func (s *recordedFlag) Set(text string) error {
	if err := s.set(text); err != nil {
		return err
	}
	s.values = append(s.values, text)
	return nil
}

// FlagValues returns the values of all flags by name. A value "" means that the default is
// detected. The join token is replaced, because it is a secret.
func FlagValues(fs *flag.FlagSet) map[string]string {
	out := map[string]string{}
	fs.VisitAll(func(f *flag.Flag) { out[f.Name] = f.Value.String() })
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
	for _, name := range slices.Sorted(maps.Keys(c.Settings)) {
		fmt.Fprintf(&out, "%s: %s\n", name, c.Settings[name])
	}
	return out.Bytes()
}
