package provision

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/kctl/verb"
)

// LabCommand returns the command 'kctl lab' with its subcommands.
func LabCommand(streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "lab",
		Short: "Run a whole cluster on this machine, and inject faults",
		Long: "A lab is a cluster on one Linux machine. Its hosts are network namespaces on a private bridge\n" +
			"without a route to other networks: replicas of the control plane, and workers. All hosts run the\n" +
			"real programs.\n" +
			"\n" +
			"A machine has one default lab. More labs can run beside it: set $" +
			lab.NameEnv +
			" to the name of a lab for\n" +
			"every command. Each named lab has its own hosts, disks, kubeconfig (~/.kube/keelson-lab@NAME) and\n" +
			"API address, which is a free port of 127.0.0.1. 'kctl lab up' prints the address and the\n" +
			"kubeconfig.",
		Example: "  kctl lab up\n  KEELSON_LAB=second kctl lab up\n  kctl lab status\n  kctl lab kill " +
			"--daemon cp1\n  kctl lab partition w2\n  kctl lab restore w2\n  kctl lab down",
	}
	verb.NewGroup(c, labUp(streams), labDown(streams), labStatus(streams), labExec(streams), labLoad(streams))
	c.AddCommand(labRestart(streams), labKill(streams), labReplace(streams), labUpgrade(streams))
	c.AddCommand(labVerb(streams, "stop HOST", "Stop a host's daemon gracefully", (*lab.Lab).Stop))
	plain := func(f func(*lab.Lab, string) error) func(*lab.Lab, context.Context, string) error {
		return func(l *lab.Lab, _ context.Context, h string) error { return f(l, h) }
	}
	c.AddCommand(labVerb(streams, "pause HOST", "Freeze all processes of a host; 'restore' resumes them",
		plain((*lab.Lab).Pause)))
	c.AddCommand(labVerb(streams, "partition HOST", "Disconnect a host from the network", plain((*lab.Lab).Partition)))
	restore := func() *cobra.Command {
		return labVerb(streams, "restore HOST", "Reconnect a host to the network, and resume its processes",
			plain((*lab.Lab).Heal))
	}
	c.AddCommand(restore(), verb.WithPreviousName(restore(), "heal"))
	c.AddCommand(labSupervise(), labForward(), labRegistry())
	return c
}

// BinDir returns the directory that contains kctl and the programs that are installed beside it.
func BinDir() string {
	exe, err := os.Executable()
	if err != nil {
		return "/usr/local/bin"
	}
	if resolved, err := filepath.EvalSymlinks(exe); err == nil {
		exe = resolved
	}
	return filepath.Dir(exe)
}

func labUp(streams genericiooptions.IOStreams) *cobra.Command {
	var cfg lab.Config
	c := &cobra.Command{
		Use:   "up",
		Short: "Start a lab and wait until it is ready",
		Long: "Start a lab and wait until it is ready. A lab that is down, for example after a reboot of the\n" +
			"machine, is started again from the disks of its hosts, with all of its objects. Such a lab cannot\n" +
			"be started with flags other than those with which it was created.\n" +
			"\n" +
			"kubectl and kctl cache the kinds of an API server for six hours. 'up' and 'down' delete that\n" +
			"discovery cache for the lab's address (in $KUBECACHEDIR or ~/.kube/cache/discovery). Other users\n" +
			"of the lab, and users of --cache-dir, refresh their discovery cache with 'kubectl api-resources'.",
		Example: "  kctl lab up\n  kctl lab up --workers 5 --memory 1Gi\n" +
			"  kctl lab up --control-plane-files ./access --control-plane-flag " +
			"--authentication-config=/etc/keelson/authn.yaml",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			wanted, err := lab.New(cfg, streams.Out)
			if err != nil {
				return err
			}
			ctx, cancel := verb.WithSignals()
			defer cancel()
			return startLab(ctx, streams.Out, wanted, c.Flags())
		},
	}
	labUpFlags(c.Flags(), &cfg)
	return c
}

func labUpFlags(f *pflag.FlagSet, cfg *lab.Config) {
	f.IntVar(&cfg.ControlPlanes, "control-planes", 3, "number of control-plane replicas with a vote")
	f.IntVar(&cfg.Standbys, "standbys", 0,
		"number of control-plane replicas without a vote; with --control-plane-flag=--replace-dead-after=30s "+
			"they replace unreachable voters (docs/how-to/replace-replicas-automatically.md)")
	f.IntVar(&cfg.Workers, "workers", 3, "number of workers")
	f.StringVar(&cfg.Listen, "listen", lab.Listen(),
		"address on this machine that leads to the API; by default, a lab of $"+lab.NameEnv+" uses the next free port")
	f.StringVar(&cfg.BinDir, "bin-dir", BinDir(), "directory of the daemons' programs")
	f.StringVar(&cfg.CNIBinDir, "cni-bin-dir", filepath.Join(BinDir(), "cni"), "directory of the CNI plugins")
	f.StringVar(&cfg.ImageDir, "image-dir", filepath.Join(BinDir(), "images"),
		"directory of image archives that are loaded into the workers and the lab's registry")
	f.StringVar(&cfg.CPU, "cpu", "4", "CPU capacity that each worker reports")
	f.StringVar(&cfg.Memory, "memory", "2Gi", "memory capacity that each worker reports")
	f.IntVar(&cfg.EvictionSeconds, "eviction-seconds", 5, "seconds after which pods are evicted from a lost node")
	f.IntVar(&cfg.Links, "links", 1, "number of network links; the workers are distributed over them, and a router "+
		"that has no routes to pods "+
		"connects them")
	f.StringVar(&cfg.Families, "families", lab.FamilyIPv4,
		"address families of hosts, pods and Services: ipv4, dual (IPv4 first) or ipv6")
	f.StringVar(&cfg.PodNetwork, "pod-network", "auto",
		"network between pods of different workers: auto, routes, vxlan or wireguard (docs/reference/pod-network.md)")
	f.StringArrayVar(&cfg.ControlPlaneFlags, "control-plane-flag", nil,
		"flag of 'keelson-controlplane run' for every replica, such as --audit-log-maxsize=10 (repeatable)")
	f.StringVar(&cfg.ControlPlaneFiles, "control-plane-files", "",
		"directory of this machine that is mounted as /etc/keelson on every replica; a changed file takes effect "+
			"when the replica reloads the file or restarts")
	f.StringVar(&cfg.Kubeconfig, "kubeconfig-out", LabKubeconfig(), "file to which the kubeconfig is written")
}

func labDown(streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:     "down",
		Short:   "Delete the lab and everything that it created",
		Example: "  kctl lab down",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			l, err := lab.Open(streams.Out)
			if err != nil {
				if !errors.Is(err, lab.ErrNotUp) {
					fmt.Fprintln(streams.ErrOut, err)
				}
				l = &lab.Lab{} // the state file is lost; Down does not need it
				l.Config.Kubeconfig = LabKubeconfig()
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if err := l.Down(ctx); err != nil {
				return err
			}
			if left := lab.ListLeftovers(); len(left) > 0 {
				return fmt.Errorf("lab: these parts were not removed: %v: run 'kctl lab down' again", left)
			}
			fmt.Fprintln(streams.Out, "the lab is down; nothing of it is left")
			return nil
		},
	}
}

func labStatus(streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "Show the lab's hosts; fails if there is no lab or it is down",
		Example: "  kctl lab status",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			l, err := openLab(streams)
			if err != nil {
				return err
			}
			if !l.ForwarderRuns() {
				fmt.Fprintf(streams.ErrOut, "nothing leads to the API at %s: 'kctl lab up' mends that\n",
					l.Config.Listen)
			}
			return lab.PrintStatus(streams.Out, l.Status(context.Background()))
		},
	}
}

func labExec(streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:                "exec HOST COMMAND [ARG...]",
		Short:              "Run a command in the namespaces of a host",
		Example:            "  kctl lab exec w1 ip route\n  kctl lab exec w1 nft list ruleset",
		Args:               cobra.MinimumNArgs(2),
		ValidArgsFunction:  verb.CompleteArgument(labHosts),
		DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			l, err := openLab(streams)
			if err != nil {
				return err
			}
			h, err := l.Host(args[0])
			if err != nil {
				return err
			}
			if args[1] == "--" {
				args = args[1:]
			}
			if len(args) < 2 {
				return errors.New("a command is missing after \"--\": kctl lab exec HOST COMMAND [ARG...]")
			}
			cmd := h.Command(context.Background(), args[1:]...)
			cmd.Stdin, cmd.Stdout, cmd.Stderr = streams.In, streams.Out, streams.ErrOut
			err = cmd.Run()
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				os.Exit(exit.ExitCode())
			}
			return err
		},
	}
}

func labVerb(
	streams genericiooptions.IOStreams, use, short string, do func(*lab.Lab, context.Context, string) error,
) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: cobra.ExactArgs(1),
		ValidArgsFunction: verb.CompleteArgument(labHosts)}
	c.Example = fmt.Sprintf("  kctl lab %s w1", c.Name())
	c.RunE = func(_ *cobra.Command, args []string) error {
		l, err := openLab(streams)
		if err != nil {
			return err
		}
		ctx, cancel := verb.WithSignals()
		defer cancel()
		if err := do(l, ctx, args[0]); err != nil {
			return err
		}
		fmt.Fprintf(streams.Out, "%s: %s done\n", args[0], c.Name())
		return nil
	}
	return c
}

func labKill(streams genericiooptions.IOStreams) *cobra.Command {
	daemon := false
	c := labVerb(streams, "kill HOST", "Cut the power of a host, or kill only its daemon",
		func(l *lab.Lab, ctx context.Context, h string) error {
			if daemon {
				return l.KillDaemon(ctx, h)
			}
			return l.Kill(ctx, h)
		})
	c.Example = "  kctl lab kill cp1\n" +
		"  kctl lab kill --daemon w1"
	c.Flags().BoolVar(&daemon, "daemon", false, "kill only the host's daemon; its containers keep running")
	return c
}

func labLoad(streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:   "load FILE...",
		Short: "Load images from archives into the lab's registry",
		Long: "Load images from archives into the lab's registry. FILE is a tar of an OCI layout or a file of\n" +
			"'docker save', plain or compressed with gzip, or a directory with an OCI layout. The workers pull\n" +
			"every image from that registry first. Pods therefore use the names of the images in the archive,\n" +
			"with imagePullPolicy Always or IfNotPresent.\n" +
			"\n" +
			"Any tool that pushes images works too, inside the registry's host. For example:\n" +
			"  kctl lab exec registry skopeo copy --dest-tls-verify=false docker-archive:/root/app.tar " +
			"docker://10.89.0.5:5000/app:v1",
		Example: "  docker save example.com/app:v1 -o app.tar && kctl lab load app.tar\n  kctl lab load " +
			"app.tar.gz ./oci-layout",
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			l, err := openLab(streams)
			if err != nil {
				return err
			}
			ctx, cancel := verb.WithSignals()
			defer cancel()
			for _, file := range args {
				loaded, err := l.LoadArchive(ctx, file)
				for _, i := range loaded {
					fmt.Fprintf(streams.Out, "%s: %s\n", file, i.Name)
				}
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
}

func labRestart(streams genericiooptions.IOStreams) *cobra.Command {
	daemon := false
	c := labVerb(streams, "restart HOST", "Restart a host, or only its daemon",
		func(l *lab.Lab, ctx context.Context, h string) error {
			if daemon {
				return l.RestartDaemon(ctx, h)
			}
			return l.Restart(ctx, h)
		})
	c.Long = "Restart a host. After 'kill', its power and its network are restored. After 'kill --daemon' or\n" +
		"'stop', its daemon is started. A running daemon is stopped gracefully first. With --daemon, only\n" +
		"the daemon is restarted, and the host must have power."
	c.Example = "  kctl lab restart cp1\n  kctl lab restart --daemon w1"
	c.Flags().BoolVar(&daemon, "daemon", false, "restart only the host's daemon; its containers keep running")
	return c
}

func labReplace(streams genericiooptions.IOStreams) *cobra.Command {
	dir := ""
	c := labVerb(streams, "replace HOST", "Run the programs of another directory on a host",
		func(l *lab.Lab, ctx context.Context, h string) error { return l.Replace(ctx, h, dir) })
	c.Long = "Run the programs of another directory on a host. Its daemon is stopped gracefully and started from\n" +
		"that directory. Containers keep running. The command waits until the replica or the node is ready.\n" +
		"Without --bin, the host runs the programs of the lab's own directory again."
	c.Example = "  kctl lab replace cp1 --bin /root/keelson/bin\n  kctl lab replace w1"
	c.Flags().StringVar(&dir, "bin", "", "directory of the programs (default: the lab's own)")
	return c
}

// The programs of the lab run the following three hidden commands. Users do not run them.

func labSupervise() *cobra.Command {
	return &cobra.Command{Use: "supervise", Hidden: true, Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return runInLab(func(ctx context.Context, l *lab.Lab) error { return l.Supervise(ctx) })
		}}
}

func labForward() *cobra.Command {
	return &cobra.Command{Use: "forward", Hidden: true, Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error {
		return runInLab(func(ctx context.Context, l *lab.Lab) error { return l.Forward(ctx) })
	}}
}

func runInLab(f func(context.Context, *lab.Lab) error) error {
	l, err := lab.Open(os.Stdout)
	if err != nil {
		return err
	}
	ctx, cancel := verb.WithSignals()
	defer cancel()
	return f(ctx, l)
}

func labRegistry() *cobra.Command {
	var listen, folder string
	c := &cobra.Command{Use: "serve-registry", Hidden: true, Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ctx, cancel := verb.WithSignals()
			defer cancel()
			return lab.ServeRegistry(ctx, listen, folder)
		}}
	c.Flags().StringVar(&listen, "listen", "127.0.0.1:5000", "address")
	c.Flags().StringVar(&folder, "folder", "/var/lib/keelson/registry", "folder of the images")
	return c
}

// labHosts returns the names of the lab's hosts for shell completion. It returns nil if there is no
// lab.
func labHosts(context.Context) []string {
	l, err := lab.Open(nil)
	if err != nil {
		return nil
	}
	var out []string
	for _, h := range l.Config.Hosts {
		out = append(out, h.Name)
	}
	return out
}
