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

// DefaultConfig is the file that is read where --config names none, if it is there.
const DefaultConfig = "/etc/keelson/agent.yaml"

// lists are the flags whose keys are lists in the file.
var lists = map[string]settings.Kind{
	"server": settings.List, "node-ip": settings.List, "insecure-registry": settings.List, "registry-mirror": settings.List,
	"nodeport-addresses": settings.List, "source-check-exempt-namespaces": settings.List, "cluster-dns": settings.List, "runtime-handler": settings.List,
	"capacity": settings.JoinedList, "node-labels": settings.JoinedList, "taints": settings.JoinedList,
	"wireguard-port": settings.Integer, "kubelet-port": settings.Integer,
}

// Configured declares --config on what Flags has declared, says in each flag's help how it is called elsewhere, and returns what
// takes, once the flags are parsed, from the environment and the file what the command line has not.
func Configured(fs *flag.FlagSet) (apply func() error) {
	fs.VisitAll(func(f *flag.Flag) { f.Usage = settings.Usage(f.Name, f.Usage) })
	file := settings.File{Path: DefaultConfig}
	spokenFlag(fs, "config", "configuration file with lines of 'key: value'; the default file may be missing; '' reads no file (default "+
		DefaultConfig+
		")", func(s string) error {
		file = settings.File{Path: s, Required: true}
		return nil
	})
	return func() error {
		return settings.Apply(settings.FromFlagSet(fs, lists, "config"), file, settings.FromEnvironment)
	}
}

// spoken is a flag that keeps what it was told: flag.Func forgets it. It is empty until then, and so is its default.
type spoken struct {
	set  func(string) error
	said []string
}

// spokenFlag declares one.
func spokenFlag(fs *flag.FlagSet, name, usage string, set func(string) error) {
	fs.Var(&spoken{set: set}, name, usage)
}

// String implements flag.Value.
func (s *spoken) String() string { return strings.Join(s.said, ",") }

// Set implements flag.Value.
func (s *spoken) Set(text string) error {
	if err := s.set(text); err != nil {
		return err
	}
	s.said = append(s.said, text)
	return nil
}

// Said are the values of all flags; "" is a default that is found out. Of a token it says only that there is one: it lets a
// machine in.
func Said(fs *flag.FlagSet) map[string]string {
	out := map[string]string{}
	fs.VisitAll(func(f *flag.Flag) { out[f.Name] = f.Value.String() })
	if out["token"] != "" {
		out["token"] = "(left out)"
	}
	return out
}

// settings is what the node's API says of them: a line for each, and the release first.
func (c *Config) settings() []byte {
	var out bytes.Buffer
	fmt.Fprintf(&out, "release: %s\n", c.Release)
	for _, name := range slices.Sorted(maps.Keys(c.Settings)) {
		fmt.Fprintf(&out, "%s: %s\n", name, c.Settings[name])
	}
	return out.Bytes()
}
