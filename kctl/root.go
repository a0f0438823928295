// Package kctl implements the command line of Keelson: kubectl's commands, and commands for the
// cluster itself. Most commands use only the API. The commands for a cluster file use ssh. The
// commands for a lab, and the commands of keelson-controlplane, work on this machine.
package kctl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/plugin"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/deploy/lab"
)

// Version is the release of kctl. The linker sets it.
var Version = "dev"

// Command returns the root command kctl with all subcommands. args are the arguments of the process
// (os.Args); kubectl uses them to find plugins.
func Command(args []string) *cobra.Command {
	selectLabKubeconfig()
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
	root.AddCommand(labCommand(streams), traceCommand(f, streams), whyCommand(f, streams), netCommand(f, streams), gatewayCommand(f, streams), snapshotCommand(f, streams), clusterCommand(f, streams))
	explainArguments(root)
	return root
}

// replaceCommand replaces the subcommand of root that has the name of with.
func replaceCommand(root, with *cobra.Command) {
	for _, c := range root.Commands() {
		if c.Name() == with.Name() {
			root.RemoveCommand(c)
		}
	}
	root.AddCommand(with)
}

// LabKubeconfig returns the default path of the kubeconfig that 'kctl lab up' writes for the lab
// that $KEELSON_LAB selects.
func LabKubeconfig() string { return labKubeconfig(lab.Root()) }

func labKubeconfig(root string) string {
	home, err := os.UserHomeDir()
	if err != nil {
		home = "/root"
	}
	return filepath.Join(home, ".kube", root)
}

// selectLabKubeconfig sets $KUBECONFIG to the kubeconfig of the lab, if it exists and no other
// cluster is configured. A lab that $KEELSON_LAB selects has precedence over ~/.kube/config, and
// over a $KUBECONFIG of another lab of this machine.
func selectLabKubeconfig() {
	set, own := os.Getenv(clientcmd.RecommendedConfigPathEnvVar), LabKubeconfig()
	switch {
	case os.Getenv(lab.NameEnv) != "":
		if set != "" && !isLabKubeconfig(set) {
			return
		}
	case set != "":
		return
	default:
		if c, err := clientcmd.LoadFromFile(clientcmd.RecommendedHomeFile); err == nil && len(c.Clusters) > 0 {
			return
		}
	}
	if _, err := os.Stat(own); err == nil {
		os.Setenv(clientcmd.RecommendedConfigPathEnvVar, own)
	}
}

// isLabKubeconfig reports whether path is the default kubeconfig of any lab of this machine.
func isLabKubeconfig(path string) bool {
	one := labKubeconfig(lab.RootPrefix)
	return path == one || strings.HasPrefix(path, one+"@")
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
		var stopped *interruption
		if errors.As(err, &stopped) {
			return stopped.exitCode()
		}
		return 1
	}
	return 0
}
