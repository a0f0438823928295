package kctl

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
)

func labCommand(streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "lab",
		Short: "A whole cluster on this machine, and faults in it",
		Long: "A lab is a cluster of namespaces on one Linux machine: replicas of the control plane and workers\n" +
			"as hosts on a private bridge with no route out, running the real binaries.\n\n" +
			"A machine has one lab, and others beside it by a name in $" + lab.NameEnv + ", which every command then needs:\n" +
			"hosts, disks, kubeconfig (~/.kube/keelson-lab@NAME) and the address that leads to the API are the named lab's own.\n" +
			"Its address is a free port of 127.0.0.1; 'kctl lab up' prints address and kubeconfig.",
		Example: "  kctl lab up\n  KEELSON_LAB=second kctl lab up\n  kctl lab status\n  kctl lab kill --daemon cp1\n  kctl lab partition w2\n  kctl lab heal w2\n  kctl lab down",
	}
	group(c, labUp(streams), labDown(streams), labStatus(streams), labExec(streams), labLoad(streams))
	c.AddCommand(labRestart(streams), labKill(streams), labReplace(streams), labUpgrade(streams))
	c.AddCommand(labVerb(streams, "stop HOST", "End a host's daemon in good order", (*lab.Lab).Stop))
	plain := func(f func(*lab.Lab, string) error) func(*lab.Lab, context.Context, string) error {
		return func(l *lab.Lab, _ context.Context, h string) error { return f(l, h) }
	}
	c.AddCommand(labVerb(streams, "pause HOST", "Freeze every process of a host ('heal' lets them go on)", plain((*lab.Lab).Pause)))
	c.AddCommand(labVerb(streams, "partition HOST", "Unplug a host's cable", plain((*lab.Lab).Partition)))
	c.AddCommand(labVerb(streams, "heal HOST", "Plug the cable in again and thaw the host", plain((*lab.Lab).Heal)))
	c.AddCommand(labSupervise(), labForward(), labRegistry())
	return c
}

func binDir() string {
	exe, err := os.Executable()
	if err != nil {
		return "/usr/local/bin"
	}
	if real, err := filepath.EvalSymlinks(exe); err == nil {
		exe = real
	}
	return filepath.Dir(exe)
}

func labUp(streams genericiooptions.IOStreams) *cobra.Command {
	var cfg lab.Config
	c := &cobra.Command{
		Use:   "up",
		Short: "Start a lab and wait until it is ready",
		Long: "Start a lab and wait until it is ready. One that is down (the machine was started anew, or everything of it was\n" +
			"killed) is started again from the disks of its hosts, with all that it held, and then takes no other flags than\n" +
			"it was made with.\n\n" +
			"kubectl and kctl keep for six hours which kinds the API at an address serves;\n" +
			"'up' and 'down' take away what they keep of the lab's address (in $KUBECACHEDIR or ~/.kube/cache/discovery), so that the\n" +
			"kinds of an earlier lab are not taken for those of this one. Where others use the lab too, or --cache-dir, they call\n" +
			"'kubectl api-resources' once after 'up', which asks anew.",
		Example: "  kctl lab up\n  kctl lab up --workers 5 --memory 1Gi\n" +
			"  kctl lab up --control-plane-files ./access --control-plane-flag --authentication-config=/etc/keelson/authn.yaml",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			wanted, err := lab.New(cfg, streams.Out)
			if err != nil {
				return err
			}
			ctx, cancel := interruptible()
			defer cancel()
			return upFrom(ctx, streams.Out, wanted, c.Flags())
		},
	}
	labUpFlags(c.Flags(), &cfg)
	return c
}

func labUpFlags(f *pflag.FlagSet, cfg *lab.Config) {
	f.IntVar(&cfg.ControlPlanes, "control-planes", 3, "replicas of the control plane")
	f.IntVar(&cfg.Standbys, "standbys", 0,
		"further replicas, without a vote: with --control-plane-flag=--replace-dead-after=30s they take the places of those that die (docs/how-to/replace-replicas-automatically.md)")
	f.IntVar(&cfg.Workers, "workers", 3, "workers")
	f.StringVar(&cfg.Listen, "listen", lab.Listen(),
		"the address on this machine that leads to the API; without the flag, a lab of $"+lab.NameEnv+" takes the next port when this one is in use")
	f.StringVar(&cfg.BinDir, "bin-dir", binDir(), "folder of the daemons")
	f.StringVar(&cfg.CNIBinDir, "cni-bin-dir", filepath.Join(binDir(), "cni"), "folder of the CNI plugins")
	f.StringVar(&cfg.ImageDir, "image-dir", filepath.Join(binDir(), "images"), "folder of image archives that workers and registry hold from the start")
	f.StringVar(&cfg.CPU, "cpu", "4", "CPUs that a worker reports")
	f.StringVar(&cfg.Memory, "memory", "2Gi", "memory that a worker reports")
	f.IntVar(&cfg.EvictionSeconds, "eviction-seconds", 5, "seconds after which pods leave a node that was lost")
	f.IntVar(&cfg.Links, "links", 1, "links on which the workers are in turn, with a router between that knows no pods")
	f.StringVar(&cfg.Families, "families", lab.FamilyIPv4, "addresses of hosts, pods and Services: ipv4, dual (IPv4 first) or ipv6")
	f.StringVar(&cfg.PodNetwork, "pod-network", "auto", "how pods of different workers reach each other: auto, routes, vxlan or wireguard (docs/reference/pod-network.md)")
	f.StringArrayVar(&cfg.ControlPlaneFlags, "control-plane-flag", nil,
		"flag of 'keelson-controlplane run' that every replica has, such as --audit-log-maxsize=10 (repeatable)")
	f.StringVar(&cfg.ControlPlaneFiles, "control-plane-files", "",
		"folder of this machine that every replica sees as /etc/keelson; what is changed in it is read again where the replica follows the file")
	f.StringVar(&cfg.Kubeconfig, "kubeconfig-out", LabKubeconfig(), "where the kubeconfig is written")
}

func labDown(streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:     "down",
		Short:   "Take the lab away, with everything it made",
		Example: "  kctl lab down",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			l, err := lab.Open(streams.Out)
			if err != nil {
				if !errors.Is(err, lab.ErrNotUp) {
					fmt.Fprintln(streams.ErrOut, err)
				}
				l = &lab.Lab{} // its state is gone; what is left on the machine is found without it
				l.Config.Kubeconfig = LabKubeconfig()
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if err := l.Down(ctx); err != nil {
				return err
			}
			if left := lab.Leftovers(); len(left) > 0 {
				return fmt.Errorf("lab: still there: %v", left)
			}
			fmt.Fprintln(streams.Out, "the lab is down; nothing of it is left")
			return nil
		},
	}
}

func labStatus(streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "Show the lab's hosts; fails when there is no lab, or it is down",
		Example: "  kctl lab status",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			l, err := usableLab(streams)
			if err != nil {
				return err
			}
			if !l.WayIn() {
				fmt.Fprintf(streams.ErrOut, "nothing leads to the API at %s: 'kctl lab up' mends that\n", l.Config.Listen)
			}
			return lab.PrintStatus(streams.Out, l.Status(context.Background()))
		},
	}
}

func labExec(streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:                "exec HOST COMMAND [ARG...]",
		Short:              "Run a command inside a host's namespaces",
		Example:            "  kctl lab exec w1 ip route\n  kctl lab exec w1 nft list ruleset",
		Args:               cobra.MinimumNArgs(2),
		ValidArgsFunction:  words(labHosts),
		DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			l, err := usableLab(streams)
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
				return errors.New("no command follows the \"--\": kctl lab exec HOST COMMAND [ARG...]")
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

func labVerb(streams genericiooptions.IOStreams, use, short string, do func(*lab.Lab, context.Context, string) error) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: cobra.ExactArgs(1), ValidArgsFunction: words(labHosts)}
	c.Example = fmt.Sprintf("  kctl lab %s w1", c.Name())
	c.RunE = func(_ *cobra.Command, args []string) error {
		l, err := usableLab(streams)
		if err != nil {
			return err
		}
		ctx, cancel := interruptible()
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
	c := labVerb(streams, "kill HOST", "Cut a host's power, or kill -9 its daemon alone", func(l *lab.Lab, ctx context.Context, h string) error {
		if daemon {
			return l.KillDaemon(ctx, h)
		}
		return l.Kill(ctx, h)
	})
	c.Example = "  kctl lab kill cp1\n  kctl lab kill --daemon w1"
	c.Flags().BoolVar(&daemon, "daemon", false, "kill the daemon only; containers stay")
	return c
}

func labLoad(streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:   "load FILE...",
		Short: "Put images from archives into the lab's registry",
		Long: "Put images from archives into the lab's registry. A file is a tar of an OCI layout or what 'docker save' writes, plain\n" +
			"or compressed with gzip; a folder is an OCI layout. The workers ask that registry first for every image, so pods name\n" +
			"the images as the archive does (imagePullPolicy Always and IfNotPresent).\n\n" +
			"Any tool that pushes works too, from inside the registry's host, for example\n" +
			"  kctl lab exec registry skopeo copy --dest-tls-verify=false docker-archive:/root/app.tar docker://10.89.0.5:5000/app:v1",
		Example: "  docker save example.com/app:v1 -o app.tar && kctl lab load app.tar\n  kctl lab load app.tar.gz ./oci-layout",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			l, err := usableLab(streams)
			if err != nil {
				return err
			}
			ctx, cancel := interruptible()
			defer cancel()
			for _, file := range args {
				loaded, err := l.Load(ctx, file)
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
	c := labVerb(streams, "restart HOST", "Start a host again, or its daemon alone",
		func(l *lab.Lab, ctx context.Context, h string) error {
			if daemon {
				return l.RestartDaemon(ctx, h)
			}
			return l.Restart(ctx, h)
		})
	c.Long = "Start a host again: with power and cable after 'kill', its daemon after 'kill --daemon' or 'stop'. A daemon that runs\n" +
		"is stopped in good order first. With --daemon the host must have power: only its daemon is started again."
	c.Example = "  kctl lab restart cp1\n  kctl lab restart --daemon w1"
	c.Flags().BoolVar(&daemon, "daemon", false, "restart the daemon only; containers stay")
	return c
}

func labReplace(streams genericiooptions.IOStreams) *cobra.Command {
	dir := ""
	c := labVerb(streams, "replace HOST", "Have a host run the programs of another folder",
		func(l *lab.Lab, ctx context.Context, h string) error { return l.Replace(ctx, h, dir) })
	c.Long = "Have a host run the programs of another folder from now on: its daemon is stopped in good order and started from there;\n" +
		"containers stay. It waits until the replica or the node is ready. Without --bin it is the lab's own folder again."
	c.Example = "  kctl lab replace cp1 --bin /root/keelson/bin\n  kctl lab replace w1"
	c.Flags().StringVar(&dir, "bin", "", "folder of the programs (default: the lab's own)")
	return c
}

// The three below are run by the lab itself.

func labSupervise() *cobra.Command {
	return &cobra.Command{Use: "supervise", Hidden: true, Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error {
		return inLab(func(ctx context.Context, l *lab.Lab) error { return l.Supervise(ctx) })
	}}
}

func labForward() *cobra.Command {
	return &cobra.Command{Use: "forward", Hidden: true, Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error {
		return inLab(func(ctx context.Context, l *lab.Lab) error { return l.Forward(ctx) })
	}}
}

func inLab(f func(context.Context, *lab.Lab) error) error {
	l, err := lab.Open(os.Stdout)
	if err != nil {
		return err
	}
	ctx, cancel := interruptible()
	defer cancel()
	return f(ctx, l)
}

func labRegistry() *cobra.Command {
	var listen, folder string
	c := &cobra.Command{Use: "serve-registry", Hidden: true, Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error {
		ctx, cancel := interruptible()
		defer cancel()
		return lab.ServeRegistry(ctx, listen, folder)
	}}
	c.Flags().StringVar(&listen, "listen", "127.0.0.1:5000", "address")
	c.Flags().StringVar(&folder, "folder", "/var/lib/keelson/registry", "folder of the images")
	return c
}
