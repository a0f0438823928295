// Package kctl implements the command line of Keelson: kubectl's commands, and commands for the
// cluster itself. Most commands use only the API. The commands for a cluster file use ssh. The
// commands for a lab, and the commands of keelson-controlplane, work on this machine.
package kctl

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/plugin"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/kctl/provision"
	"keelson.dev/keelson/kctl/verb"
)

// Version is the release of kctl. The linker sets it.
var Version = "dev"

// Command returns the root command kctl with all subcommands. args are the arguments of the process
// (os.Args); kubectl uses them to find plugins.
func Command(args []string) *cobra.Command {
	provision.SelectLabKubeconfig()
	streams := genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}
	flags := genericclioptions.NewConfigFlags(true).WithDeprecatedPasswordFlag().
		WithDiscoveryBurst(300).WithDiscoveryQPS(50).WithWarningPrinter(streams)
	compareIdentities(flags, streams.ErrOut)
	root := cmd.NewKubectlCommand(cmd.KubectlOptions{
		PluginHandler: cmd.NewDefaultPluginHandler(plugin.ValidPluginFilenamePrefixes),
		Arguments:     args,
		ConfigFlags:   flags,
		IOStreams:     streams,
	})
	root.Use = "kctl"
	root.SilenceErrors, root.SilenceUsage = true, true
	root.Short = "kctl controls a Keelson cluster"
	root.Long = "kctl controls a Keelson cluster. It has every command of kubectl, and these commands for the\n" +
		"cluster itself:\n" +
		"\n" +
		"  kctl cluster   Manage machines, control-plane replicas, backups, keys and join tokens\n" +
		"  kctl why       Explain why an object is not healthy, and how to repair it\n" +
		"  kctl trace     Show the time that each stage of an apply took\n" +
		"  kctl net       Trace connections; show the use of Services and NetworkPolicies\n" +
		"  kctl gateway   Install Gateway API\n" +
		"  kctl snapshot  Install volume snapshots\n" +
		"  kctl lab       Run a whole cluster on this machine, and inject faults"
	f := cmdutil.NewFactory(cmdutil.NewMatchVersionFlags(flags))
	replaceCommand(root, versionCommand(f, streams))
	root.AddCommand(provision.LabCommand(streams), traceCommand(f, streams), whyCommand(f, streams),
		netCommand(f, streams), gatewayCommand(f, streams), snapshotCommand(f, streams), clusterCommand(f, streams))
	explainArguments(root)
	return root
}

// replaceCommand adds replacement to the subcommands of root, and removes the existing subcommand
// with the same name.
func replaceCommand(root, replacement *cobra.Command) {
	for _, c := range root.Commands() {
		if c.Name() == replacement.Name() {
			root.RemoveCommand(c)
		}
	}
	root.AddCommand(replacement)
}

func versionCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	clientOnly := false
	c := &cobra.Command{
		Use:     "version",
		Short:   "Print the versions of kctl and of the cluster",
		Example: "  kctl version\n  kctl version --client",
		RunE: func(*cobra.Command, []string) error {
			fmt.Fprintf(streams.Out, "kctl:     %s\n", Version)
			if clientOnly {
				return nil
			}
			d, err := f.ToDiscoveryClient()
			if err != nil {
				return err
			}
			d.Invalidate()
			v, err := d.ServerVersion()
			if err != nil {
				return fmt.Errorf("reading the cluster's version: %w", err)
			}
			fmt.Fprintf(streams.Out, "cluster:  %s (%s)\n", v.GitVersion, v.Platform)
			return nil
		},
	}
	c.Flags().BoolVar(&clientOnly, "client", false, "print only the version of kctl")
	return c
}

// Main runs the command in os.Args and returns the exit code of the process.
func Main() int {
	silenceDiscovery()
	cmdutil.BehaviorOnFatal(func(text string, code int) { // for errors of kubectl's commands
		if text != "" {
			fmt.Fprintln(os.Stderr, fatalText(text)+untrustedCAHint(text))
		}
		os.Exit(code)
	})
	if c, err := Command(os.Args).ExecuteC(); err != nil {
		if errors.Is(err, errFound) {
			return exitFound
		}
		fmt.Fprintln(os.Stderr, commandErrorText(c, err))
		var stopped *verb.Interruption
		if errors.As(err, &stopped) {
			return stopped.ExitCode()
		}
		return 1
	}
	return 0
}
