package node

import (
	"flag"

	"keelson.dev/keelson/internal/settings"
)

// DefaultConfig is the file that is read where --config names none, if it is there.
const DefaultConfig = "/etc/keelson/agent.yaml"

// lists are the flags whose keys are lists in the file.
var lists = map[string]settings.Kind{
	"server": settings.Many, "node-ip": settings.Many, "insecure-registry": settings.Many, "registry-mirror": settings.Many,
	"nodeport-addresses": settings.Many, "cluster-dns": settings.Many, "runtime-handler": settings.Many,
	"capacity": settings.Joined, "node-labels": settings.Joined, "taints": settings.Joined,
	"wireguard-port": settings.Number, "kubelet-port": settings.Number,
}

// Configured declares --config on what Flags has declared, says in each flag's help how it is called elsewhere, and returns what
// takes, once the flags are parsed, from the environment and the file what the command line has not.
func Configured(fs *flag.FlagSet) (apply func() error) {
	fs.VisitAll(func(f *flag.Flag) { f.Usage = settings.Usage(f.Name, f.Usage) })
	file := settings.File{Path: DefaultConfig}
	fs.Func("config", "file of settings, key: value; one that is named must exist, '' is none (default "+DefaultConfig+")", func(s string) error {
		file = settings.File{Path: s, Must: true}
		return nil
	})
	return func() error {
		return settings.Apply(settings.OfFlagSet(fs, lists, "config"), file, settings.FromEnvironment)
	}
}
