// Keelson-agent runs the pods of one Linux machine.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"keelson.dev/keelson/agent/network"
	"keelson.dev/keelson/agent/node"
	"keelson.dev/keelson/agent/oci"
	"keelson.dev/keelson/agent/proxy"
	"keelson.dev/keelson/agent/volume"
	"keelson.dev/keelson/agent/volume/iscsi"
	"keelson.dev/keelson/agent/volume/remote"
	"keelson.dev/keelson/cmd/internal/commandline"
	"keelson.dev/keelson/csi/local"
	"keelson.dev/keelson/internal/logtail"
	"keelson.dev/keelson/internal/memory"
)

// version is set by the linker.
var version = "dev"

// podsGrace is the termination grace period of pods when the machine shuts down.
const podsGrace = 30 * time.Second

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
	c, err := commandline.Execute(context.Background(), newCommand(), os.Args[1:])
	var usage *commandline.UsageError
	switch {
	case err == nil:
	case c.Name() == checkName:
		fmt.Fprintln(os.Stderr, "keelson-agent:", err)
		os.Exit(2)
	case errors.As(err, &usage):
		fail(2, err.Error())
	default:
		fail(1, err.Error())
	}
}

// checkName is the command that validates the settings.
const checkName = "check"

// newCommand returns the agent's root command with its subcommands.
func newCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "keelson-agent",
		Short: "Run the pods of one Linux machine",
		Long: `Run the pods of one Linux machine.

A setting that is not given by a flag is read from the environment, or else from the configuration
file (--config). The help of each flag ends with its key in the file and its environment variable.`,
		Example: `  keelson-agent --server 192.0.2.11:6444 --token-file /var/lib/keelson/token
  keelson-agent --config /etc/keelson/agent.yaml
  keelson-agent check --config /etc/keelson/agent.yaml`,
		Version: version,
		Args: rejectArguments("unexpected argument %s: the commands are check, end-pods, remove-network and " +
			"remove-volumes: " +
			"see 'keelson-agent --help'"),
	}
	root.CompletionOptions.DisableDefaultCmd = true
	commandline.MarkFlagErrors(root)
	flags := root.PersistentFlags()
	p := &program{cfg: node.Flags(flags), flags: flags}
	flags.BoolVar(&p.verbose, "verbose", false, "log debug messages")
	p.applySettings = node.WithConfigFile(flags)
	root.RunE = func(c *cobra.Command, _ []string) error { return p.runAgent(c.Context()) }
	root.AddCommand(p.newCheckCommand(), p.newEndPodsCommand(), p.newRemoveNetworkCommand(),
		p.newRemoveVolumesCommand())
	return root
}

// rejectArguments returns a validator that returns a UsageError if a command has positional
// arguments. format is the error's format string. Its only operand is the first argument.
func rejectArguments(format string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return &commandline.UsageError{Err: fmt.Errorf(format, args[0])}
	}
}

// program contains the values of the flags that all commands share.
type program struct {
	cfg     *node.Config
	flags   *pflag.FlagSet
	verbose bool
	// applySettings sets each flag that is not on the command line from the environment or from the
	// configuration file.
	applySettings func() error
}

func (p *program) newCheckCommand() *cobra.Command {
	return &cobra.Command{
		Use:   checkName,
		Short: "Check the settings without starting the agent",
		Long: `Check the settings without starting the agent: the flags, the environment and the configuration
file. An error has the same text as the error of an agent that starts with these settings. Nothing
on the machine is changed.`,
		Example: "  keelson-agent check --config /etc/keelson/agent.yaml",
		Args:    rejectArguments("check takes flags alone, and %s is none: the file of settings is that of --config"),
		RunE: func(*cobra.Command, []string) error {
			if err := p.applySettings(); err != nil {
				return err
			}
			return p.cfg.Check()
		},
	}
}

func (p *program) newEndPodsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "end-pods",
		Short: "Stop all pods before the machine shuts down",
		Long: `Stop all pods before the machine shuts down, after the agent has stopped. keelson-pods.service runs
this command.`,
		Example: "  keelson-agent end-pods",
		Args:    rejectArguments("unexpected argument %s: see 'keelson-agent end-pods --help'"),
		RunE: func(c *cobra.Command, _ []string) error {
			if err := p.applySettings(); err != nil {
				return &commandline.UsageError{Err: err}
			}
			p.prepareProcess()
			return oci.EndPods(c.Context(), p.cfg.OCI(), podsGrace)
		},
	}
}

func (p *program) newRemoveNetworkCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "remove-network",
		Short:   "Remove the pod network of a node that leaves its cluster",
		Example: "  keelson-agent remove-network",
		Args:    rejectArguments("unexpected argument %s: see 'keelson-agent remove-network --help'"),
		RunE: func(c *cobra.Command, _ []string) error { // the settings of a running agent are not required
			p.prepareProcess()
			return errors.Join(network.Remove(c.Context()), proxy.Remove())
		},
	}
}

func (p *program) newRemoveVolumesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "remove-volumes",
		Short: "Remove the iSCSI sessions of a node that leaves its cluster",
		Long: `Remove iSCSI sessions and their records, if the node leaves its cluster and its volumes are
unmounted.`,
		Example: "  keelson-agent remove-volumes",
		Args:    rejectArguments("unexpected argument %s: see 'keelson-agent remove-volumes --help'"),
		RunE: func(c *cobra.Command, _ []string) error { // the settings of a running agent are not required
			p.prepareProcess()
			return volume.RemoveISCSI(c.Context(), p.cfg.Dirs.Kubelet, iscsi.Node{Log: p.cfg.Log})
		},
	}
}

// prepareProcess configures the log and the OOM score of this process. It must be called after
// applySettings.
func (p *program) prepareProcess() {
	cfg := p.cfg
	cfg.Release, cfg.Diagnostics.Settings = version, node.FlagValues(p.flags)
	level := slog.LevelInfo
	if p.verbose {
		level = slog.LevelDebug
	}
	cfg.Diagnostics.Recent = logtail.New(node.RecentLog)
	cfg.Log = slog.New(slog.NewTextHandler(io.MultiWriter(os.Stderr, cfg.Diagnostics.Recent),
		&slog.HandlerOptions{Level: level}))
	if err := memory.SetOOMScore(memory.DaemonOOMScore); err != nil {
		cfg.Log.Warn("the agent cannot be shielded from the OOM killer", "error", err)
	}
}

// runAgent runs the agent until ctx or a signal ends it.
func (p *program) runAgent(ctx context.Context) error {
	if err := p.applySettings(); err != nil {
		return &commandline.UsageError{Err: err}
	}
	p.prepareProcess()
	if err := p.cfg.Complete(); err != nil {
		return &commandline.UsageError{Err: err}
	}
	if err := p.cfg.WithNetwork(); err != nil {
		return &commandline.UsageError{Err: err}
	}
	n, err := node.New(*p.cfg)
	if err != nil {
		return &commandline.UsageError{Err: err}
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := n.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func fail(code int, message string) {
	slog.Error(message)
	os.Exit(code)
}
