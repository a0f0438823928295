// Keelson-agent runs the pods of one Linux machine.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"keelson.dev/keelson/agent/network"
	"keelson.dev/keelson/agent/node"
	"keelson.dev/keelson/agent/oci"
	"keelson.dev/keelson/agent/proxy"
	"keelson.dev/keelson/agent/volume"
	"keelson.dev/keelson/agent/volume/iscsi"
	"keelson.dev/keelson/agent/volume/remote"
	"keelson.dev/keelson/csi/local"
	"keelson.dev/keelson/internal/logtail"
	"keelson.dev/keelson/internal/memory"
)

// version is set by the linker.
var version = "dev"

// podsGrace is the grace period of pods when the machine shuts down.
const podsGrace = 30 * time.Second

// removals are the arguments for a node that leaves its cluster, each with its function.
var removals = map[string]func(*node.Config) error{
	"remove-network": func(*node.Config) error { return errors.Join(network.Remove(context.Background()), proxy.Remove()) },
	"remove-volumes": func(c *node.Config) error {
		return volume.RemoveISCSI(context.Background(), c.KubeletDir, iscsi.Node{Log: c.Log})
	},
}

func main() {
	if remote.Main() {
		return
	}
	if len(os.Args) == 2 && os.Args[1] == local.GuardCommand {
		if err := local.RunThawGuard(); err != nil {
			fail(1, err.Error())
		}
		return
	}
	if len(os.Args) == 2 && os.Args[1] == "--version" {
		fmt.Println("keelson-agent version", version)
		return
	}
	if len(os.Args) > 1 && os.Args[1] == "check" {
		if err := check(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "keelson-agent:", err)
			os.Exit(2)
		}
		return
	}
	cfg := node.Flags(flag.CommandLine)
	verbose := verboseFlag(flag.CommandLine)
	apply := node.WithConfigFile(flag.CommandLine)
	flag.Usage = usage
	flag.Parse()
	var removes func(*node.Config) error // set for a node that leaves its cluster; its settings are not required
	if flag.NArg() == 1 {
		removes = removals[flag.Arg(0)]
	}
	goesDown := flag.NArg() == 1 && flag.Arg(0) == "end-pods"
	if flag.NArg() > 0 && removes == nil && !goesDown {
		fail(2, "unexpected argument "+flag.Arg(0)+": the commands are check, end-pods, remove-network and remove-volumes: see 'keelson-agent --help'")
	}
	if removes == nil {
		if err := apply(); err != nil {
			fail(2, err.Error())
		}
	}
	cfg.Release, cfg.Settings = version, node.FlagValues(flag.CommandLine)
	level := slog.LevelInfo
	if *verbose {
		level = slog.LevelDebug
	}
	cfg.Recent = logtail.New(node.RecentLog)
	cfg.Log = slog.New(slog.NewTextHandler(io.MultiWriter(os.Stderr, cfg.Recent), &slog.HandlerOptions{Level: level}))
	if err := memory.SetOOMScore(memory.DaemonOOMScore); err != nil {
		cfg.Log.Warn("the agent cannot be shielded from the OOM killer", "error", err)
	}
	if removes != nil {
		if err := removes(cfg); err != nil {
			fail(1, err.Error())
		}
		return
	}
	if goesDown {
		if err := oci.EndPods(context.Background(), cfg.OCI(), podsGrace); err != nil {
			fail(1, err.Error())
		}
		return
	}
	if err := cfg.Complete(); err != nil {
		fail(2, err.Error())
	}
	if err := cfg.WithNetwork(); err != nil {
		fail(2, err.Error())
	}
	n, err := node.New(*cfg)
	if err != nil {
		fail(2, err.Error())
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := n.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		fail(1, err.Error())
	}
}

// check validates the settings that an agent with this command line would have. It prints the same
// as a starting agent, so that a settings file can be checked before it replaces a valid one.
func check(args []string) error {
	fs := flag.NewFlagSet("keelson-agent check", flag.ContinueOnError)
	fs.SetOutput(io.Discard) // the error contains the message
	cfg := node.Flags(fs)
	verboseFlag(fs)
	apply := node.WithConfigFile(fs)
	err := fs.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		usage()
		return nil
	}
	if err == nil && fs.NArg() > 0 {
		err = fmt.Errorf("check takes flags alone, and %s is none: the file of settings is that of --config", fs.Arg(0))
	}
	if err == nil {
		err = apply()
	}
	if err != nil {
		return err
	}
	return cfg.Check()
}

// verboseFlag declares the flag that makes the agent log debug messages.
func verboseFlag(fs *flag.FlagSet) *bool { return fs.Bool("verbose", false, "log debug messages") }

// usageText is the help of the agent above that of its flags.
const usageText = `keelson-agent runs the pods of one Linux machine.

Usage:
  keelson-agent [FLAGS]                 run the agent
  keelson-agent check [FLAGS]           check the settings without starting the agent
  keelson-agent [FLAGS] end-pods        stop all pods after the agent has stopped, before the machine
                                        shuts down (keelson-pods.service runs this command)
  keelson-agent [FLAGS] remove-network  remove the pod network, if the node leaves its cluster
  keelson-agent [FLAGS] remove-volumes  remove iSCSI sessions and their records, if the node leaves its
                                        cluster and its volumes are unmounted
  keelson-agent --version               print the version

Examples:
  keelson-agent --server 192.0.2.11:6444 --token-file /var/lib/keelson/token
  keelson-agent --config /etc/keelson/agent.yaml
  keelson-agent check --config /etc/keelson/agent.yaml

A setting that is not given by a flag is read from the environment, or else from the configuration
file (--config). The help of each flag ends with its key in the file and its environment variable.

Flags:
`

func usage() {
	fmt.Fprint(flag.CommandLine.Output(), usageText)
	flag.PrintDefaults()
}

func fail(code int, message string) {
	slog.Error(message)
	os.Exit(code)
}
