package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/dns"
	"keelson.dev/keelson/agent/network"
	"keelson.dev/keelson/agent/oci"
	"keelson.dev/keelson/agent/pod/admission"
	"keelson.dev/keelson/agent/proxy"
	"keelson.dev/keelson/internal/reservedspace"
	"keelson.dev/keelson/internal/saturate"
)

// Version is the kubelet version in the node's status. It starts with the Kubernetes version that
// defines the pod behavior of the agent.
const Version = "v1.37.2-keelson"

// Proxy maintains the Service rules in the kernel of this node.
type Proxy interface {
	// Run maintains the rules until ctx ends. It reports the revision of the objects that the rules
	// reflect.
	Run(ctx context.Context, objects agent.Objects, reports agent.Reporter) error
}

// Session is the agent's connection to the control plane.
type Session interface {
	agent.Objects
	agent.Reporter
	Run(ctx context.Context) error
}

// minFence is the minimum of Config.Storage.FenceAfter. It is longer than any time between two
// responses of a healthy control plane.
const minFence = 10 * time.Second

// Config configures a node agent.
type Config struct {
	// Release is the build of the program. The node reports it as the version of its container
	// runtime, which is part of the agent. "" = Version.
	Release  string
	NodeName string
	NodeIPs  []string // the first is the primary address; empty: detected

	Join        JoinConfig
	Dirs        DirConfig
	Node        ObjectConfig
	Registries  RegistryConfig
	Pods        PodConfig
	Storage     StorageConfig
	PodNetwork  NetworkConfig
	Services    ServiceConfig
	Listen      ListenConfig
	Parts       Parts
	Log         *slog.Logger
	Diagnostics DiagnosticConfig
}

// stringList is a pflag.Value that appends to a list. The flag may be repeated, and each value may
// be a comma-separated list.
type stringList struct{ values *[]string }

// Type implements pflag.Value.
func (l stringList) Type() string { return "value" }

func (l stringList) String() string { return strings.Join(*l.values, ",") }

func (l stringList) Set(s string) error {
	for part := range strings.SplitSeq(s, ",") {
		if part = strings.TrimSpace(part); part != "" {
			*l.values = append(*l.values, part)
		}
	}
	return nil
}

// RecentLog is how many bytes of the end of its log an agent keeps in memory, for the node's API.
const RecentLog = 128 << 10

// Flags declares the agent's command-line flags on fs. It returns the configuration, which is
// filled in when the flags are parsed.
func Flags(fs *pflag.FlagSet) *Config {
	c := &Config{}
	host, err := os.Hostname()
	if err != nil {
		host = "" // --node-name is required then; see Check
	}
	fs.Var(stringList{&c.Join.Servers}, "server",
		"address of a control-plane replica for agents, HOST:PORT (repeatable)")
	fs.StringVar(&c.Join.Token, "token", "", "join token; required until the node has its certificate")
	fs.StringVar(&c.Join.TokenFile, "token-file", "",
		"file with the join token; it is removed after the node has received its certificate")
	fs.StringVar(&c.NodeName, "node-name", strings.ToLower(host), "name of this node")
	fs.Var(stringList{&c.NodeIPs}, "node-ip", "IP address of this node (repeatable; default: detected)")
	fs.StringVar(&c.Dirs.State, "state-dir", "/var/lib/keelson", "directory for state that persists across reboots")
	fs.StringVar(&c.Dirs.Run, "run-dir", "/run/keelson", "directory for state that is cleared at reboot")
	fs.StringVar(&c.Dirs.Logs, "log-dir", "/var/log/pods", "directory of container logs")
	fs.StringVar(&c.Dirs.LogLinks, "log-links-dir", "/var/log/containers",
		"directory in which a link to the log of each container is created, for log shippers; empty disables the links")
	fs.StringVar(&c.Dirs.CgroupRoot, "cgroup-root", "/keelson", "cgroup below which all pods run")
	fs.StringVar(&c.Dirs.CNIConf, "cni-conf-dir", "/etc/cni/net.d",
		"directory of CNI configurations; a configuration in it is used instead of Keelson's pod network")
	fs.StringVar(&c.Dirs.CNIBin, "cni-bin-dir", "/opt/cni/bin", "directory of CNI plugins")
	declareFlag(fs, "pod-network", "network between pods of different nodes: auto (routes to nodes on the same link, "+
		"VXLAN to all others), "+
		"routes, vxlan, or wireguard (encrypted); must be the same on all nodes (default auto)",
		func(s string) (err error) {
			c.PodNetwork.mode, err = network.ParseMode(s)
			return err
		})
	c.PodNetwork.wireguard.Port = network.DefaultWireGuardPort
	declareFlag(fs, "wireguard-port", fmt.Sprintf("UDP port of WireGuard; must be the same on all nodes (default %d)",
		network.DefaultWireGuardPort),
		func(s string) error { return c.setWireGuardPort(s) })
	declareFlag(fs, "wireguard-keepalive",
		"interval of WireGuard keepalives to all other nodes, such as 25s, if a firewall between the nodes drops "+
			"idle connections; 0 disables keepalives (default 0)", func(s string) error { return c.setKeepalive(s) })
	fs.StringVar(&c.Dirs.Archives, "archives-dir", "",
		"directory of image archives to import (default STATE-DIR/images.d)")
	fs.StringVar(&c.Dirs.Runtime, "runtime-dir", "",
		"directory of keelson-shim, keelson-oci and keelson-pause (default: the directory of this program)")
	fs.StringVar(&c.Dirs.Kubelet, "kubelet-dir", "/var/lib/kubelet",
		"directory in which CSI drivers and device plugins expect kubelet's directories plugins, "+
			"plugins_registry, pods and device-plugins")
	fs.StringVar(&c.Dirs.PluginRegistration, "plugin-registration-dir", "",
		"directory in which CSI drivers and plugins register (default KUBELET-DIR/plugins_registry)")
	fs.BoolVar(&c.Pods.StartUnconfirmed, "start-unconfirmed-pods", false,
		"after a reboot of the machine, start all pods that the agent had recorded on disk, before the control plane "+
			"has confirmed that they are assigned to this node; a pod that was replaced in the meantime then runs "+
			"twice. If false, only pods of DaemonSets and static pods are started")
	declareStorageFlags(fs, c)
	declareRegistryFlags(fs, c)
	fs.BoolVar(&c.PodNetwork.Policies, "network-policy", true,
		"enforce network policies; set to false if another product enforces them, unless that product has a "+
			"configuration in --cni-conf-dir")
	declareFlag(fs, "source-check-exempt-namespaces",
		"namespaces, NAMESPACE,..., whose pods may send packets from IP and MAC addresses other than their own, "+
			"for VRRP, VPN servers and routers; '*' stands for all namespaces (repeatable; default: none)",
		func(s string) error { return c.addSourceExempt(s) })
	fs.BoolVar(&c.Pods.SeccompDefault, "seccomp-default", false,
		"use the runtime's default seccomp profile for containers without a profile")
	declareFlag(fs, "pod-security",
		"least restrictive Pod Security level that this node accepts: privileged, baseline or restricted, "+
			"optionally with :VERSION (default privileged)",
		func(s string) (err error) {
			c.Pods.Security, err = admission.ParseCeiling(s)
			return err
		})
	declareServiceFlags(fs, c)
	fs.Int64Var(&c.Node.MaxPods, "max-pods", 110, "maximum number of pods on this node")
	fs.Int64Var(&c.Pods.PIDs, "pod-max-pids", 4096, "maximum number of processes and threads of a pod; -1 for no limit")
	fs.BoolVar(&c.Pods.SingleProcessOOMKill, "single-process-oom-kill", false,
		"when a container is out of memory, kill only the process that the kernel selects, and not all of its "+
			"processes (with cgroup v1 it is always one)")
	fs.BoolVar(&c.Node.FailSwapOn, "fail-swap-on", false, "refuse to start if swap is enabled on this machine")
	declareFlag(fs, "kubelet-port", "port of the node's HTTPS server, which serves health, metrics, statistics and "+
		"pods as kubelet does; 0 "+
		"disables it (default 10250)",
		func(s string) error {
			n, err := strconv.ParseUint(s, 10, 16)
			c.Listen.KubeletPort = int32(n)
			return err
		})
	c.Listen.KubeletPort = 10250
	declareFlag(fs, "capacity", "resources that this node reports instead of the machine's, such as cpu=2,memory=4Gi",
		func(s string) (err error) {
			c.Node.Capacity, err = parseResources(s)
			return err
		})
	declareFlag(fs, "node-labels", "labels of the Node, KEY=VALUE,...", func(s string) (err error) {
		c.Node.Labels, err = parseLabels(s)
		return err
	})
	declareFlag(fs, "taints", "taints of the Node, KEY[=VALUE]:EFFECT,...", func(s string) (err error) {
		c.Node.Taints, err = parseTaints(s)
		return err
	})
	return c
}

// declareStorageFlags declares the flags of volumes and reserved disk space.
func declareStorageFlags(fs *pflag.FlagSet, c *Config) {
	fs.DurationVar(&c.Storage.FenceAfter, "fence-after", 20*time.Second,
		"time without contact to a writable control plane after which pods with attached volumes are stopped, so "+
			"that other nodes can use the volumes; in whole seconds. 0 disables this: the volumes of a lost node "+
			"then move only after the node is marked out of service. A longer time takes effect after the control "+
			"plane has received it")
	fs.BoolVar(&c.Storage.LocalVolumes, "local-volumes", true,
		"provide volumes on this node's own disk in STATE-DIR/local-volumes (driver local.csi.keelson.dev)")
	c.declareReserveFlags(fs)
}

// declareRegistryFlags declares the flags for the access to image registries.
func declareRegistryFlags(fs *pflag.FlagSet, c *Config) {
	fs.Var(stringList{&c.Registries.Insecure}, "insecure-registry",
		"registry, HOST[:PORT], that is accessed over plain HTTP (repeatable)")
	declareFlag(fs, "registry-mirror",
		"mirror of a registry, REGISTRY=HOST[:PORT], from which images are pulled first; REGISTRY '*' stands for "+
			"all registries without a mirror of their own (repeatable, tried in order)", func(s string) error {
			return c.addMirror(s)
		})
}

// declareServiceFlags declares the flags for the rules of Services, cluster DNS, the local proxy of
// the API, and RuntimeClass handlers.
func declareServiceFlags(fs *pflag.FlagSet, c *Config) {
	c.Services.Mode = proxy.ModeNFTables
	declareFlag(fs, "proxy-mode", "mode of the rules for Services: nftables, iptables, ipvs, or none if another "+
		"product provides Services; "+
		"rules of other modes are removed (default nftables)", func(s string) (err error) {
		c.Services.Mode, err = proxy.ParseMode(s)
		return err
	})
	declareFlag(fs, "nodeport-addresses",
		"CIDRs,... of the node's addresses that accept connections to node ports (repeatable; default: all but "+
			"loopback)",
		func(s string) error { return c.addNodePortAddresses(s) })
	fs.StringVar(&c.Services.Healthz, "proxy-healthz-address", fmt.Sprintf(":%d", proxyHealthzPort),
		"address, [ADDRESS]:PORT, of the health endpoints /healthz and /livez for load balancers in front of the "+
			"nodes; none disables them, as does --proxy-mode=none")
	fs.Var(stringList{&c.Pods.ClusterDNS}, "cluster-dns",
		"DNS server for pods (repeatable; default: the address of Service kube-system/kube-dns, if it exists)")
	fs.StringVar(&c.Listen.DNS, "dns-local-address", dns.LinkLocal.String(),
		"address of this node at which the agent's DNS server also listens, in addition to the address of "+
			"Service kube-system/kube-dns; none disables it")
	fs.StringVar(&c.Listen.API, "local-api-address", "127.0.0.1:6443",
		"loopback address, ADDRESS:PORT, at which the agent proxies connections to a ready API server; none "+
			"disables the proxy")
	fs.StringVar(&c.Pods.ResolvConf, "resolv-conf", "/etc/resolv.conf",
		"resolver configuration for pods; if it has only servers at loopback addresses, those of "+
			"systemd-resolved are used")
	declareFlag(fs, "runtime-handler",
		"additional handler name of RuntimeClasses for this node's runtime, which always has the names keelson "+
			"and runc (repeatable)", c.addHandler)
}

// declareReserveFlags declares the flags for reserved disk space, inodes and memory.
func (c *Config) declareReserveFlags(fs *pflag.FlagSet) {
	declareFlag(fs, "disk-pressure-below",
		"free space on the disk of STATE-DIR below which the node has disk pressure, accepts no pods and evicts "+
			"pods, as a percentage or a size, such as 5% or 20Gi. Local volumes keep this much free, and image "+
			"pulls stop at half of it. Unused images are deleted if less than 1.5 times this much is free (default "+
			reservedspace.Default.String()+
			")", func(s string) (err error) {
			c.Node.DiskFloor, err = reservedspace.Parse(s)
			return err
		})
	declareFlag(fs, "inode-pressure-below",
		"free inodes on the disk of STATE-DIR below which the node has disk pressure, as a percentage or a "+
			"number, such as 3% or 50000. Unused images are deleted if less than 1.5 times this many "+
			"are free (default "+
			defaultInodeFloor.String()+
			")", func(s string) (err error) {
			c.Node.InodeFloor, err = parseInodeFloor(s)
			return err
		})
	declareFlag(fs, "memory-pressure-below",
		"available memory below which the node has memory pressure, accepts no pods without memory requests, and "+
			"evicts pods until enough memory is available; as a size or a percentage, such as 500Mi or 5% (default "+
			defaultMemoryFloor.String()+
			")", func(s string) (err error) {
			c.Node.MemoryFloor, err = parseMemoryFloor(s)
			return err
		})
	declareFlag(fs, "local-volumes-limit", "maximum total size of the local volumes, such as 100Gi (default: the size "+
		"of the disk without the space "+
		"that --disk-pressure-below reserves)", func(s string) error {
		q, err := resource.ParseQuantity(s)
		if err != nil || q.Sign() <= 0 {
			return fmt.Errorf("%q is no size above zero", s)
		}
		c.Storage.LocalVolumesLimit = saturate.Value(&q)
		return nil
	})
}

// Check returns an error that names a missing or invalid flag, or nil. It does not inspect the
// machine and changes nothing.
func (c *Config) Check() error {
	if msgs := validation.IsDNS1123Subdomain(c.NodeName); len(msgs) > 0 {
		return fmt.Errorf("--node-name %q: %s", c.NodeName, msgs[0])
	}
	if c.Parts.Session == nil && len(c.Join.Servers) == 0 {
		return errors.New("--server is missing: the address of a control-plane replica, HOST:PORT")
	}
	if a, err := netip.ParseAddr(c.Listen.DNS); err != nil && c.Listen.DNS != "" && c.Listen.DNS != "none" ||
		err == nil && !a.IsLinkLocalUnicast() && !a.IsLoopback() {
		return fmt.Errorf("--dns-local-address %q: want a link-local address such as %s, or none",
			c.Listen.DNS, dns.LinkLocal)
	}
	if c.Listen.API != "" && c.Listen.API != "none" {
		if a, err := netip.ParseAddrPort(c.Listen.API); err != nil || !a.Addr().IsLoopback() || a.Port() == 0 {
			return fmt.Errorf("--local-api-address %q: want a loopback address and a port, such as 127.0.0.1:6443, or "+
				"none", c.Listen.API)
		}
	}
	if _, err := healthzAddress(c.Services.Healthz); err != nil {
		return err
	}
	if c.Storage.FenceAfter != 0 && (c.Storage.FenceAfter < minFence || c.Storage.FenceAfter%time.Second != 0) {
		return fmt.Errorf("--fence-after %s: want whole seconds, at least %s, or 0 for never",
			c.Storage.FenceAfter, minFence)
	}
	return nil
}

// Complete validates the configuration like Check, and sets the defaults of unset fields. Some of
// the defaults depend on the machine.
func (c *Config) Complete() error {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if err := c.Check(); err != nil {
		return err
	}
	if c.Node.FailSwapOn {
		if err := checkSwap(procSwaps); err != nil {
			return err
		}
	}
	if c.Node.MaxPods == 0 {
		c.Node.MaxPods = 110
	}
	if c.Dirs.Archives == "" {
		c.Dirs.Archives = filepath.Join(c.Dirs.State, "images.d")
	}
	if c.Dirs.PluginRegistration == "" && c.Dirs.Kubelet != "" {
		c.Dirs.PluginRegistration = filepath.Join(c.Dirs.Kubelet, "plugins_registry")
	}
	if c.Dirs.DevicePlugins == "" && c.Dirs.Kubelet != "" {
		c.Dirs.DevicePlugins = filepath.Join(c.Dirs.Kubelet, "device-plugins")
	}
	if c.Dirs.PodResources == "" && c.Dirs.Kubelet != "" {
		c.Dirs.PodResources = filepath.Join(c.Dirs.Kubelet, "pod-resources", "kubelet.sock")
	}
	if c.Dirs.Runtime == "" && c.Parts.Runtime == nil {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("--runtime-dir is not set, and the folder of this program could not be detected: %w", err)
		}
		c.Dirs.Runtime = filepath.Dir(self)
	}
	if len(c.NodeIPs) == 0 {
		ip, err := primaryAddress()
		if err != nil {
			return fmt.Errorf("--node-ip is not set and could not be detected: %w", err)
		}
		c.NodeIPs = []string{ip}
	}
	return nil
}

func (c *Config) agentPaths() agent.Paths {
	return agent.Paths{State: c.Dirs.State, Run: c.Dirs.Run, Logs: c.Dirs.Logs, LogLinks: c.Dirs.LogLinks,
		CNIConf:  c.Dirs.CNIConf,
		CNIBin:   c.Dirs.CNIBin,
		Archives: c.Dirs.Archives, Kubelet: c.Dirs.Kubelet}
}

// OCI returns the configuration of the container runtime: its folders and its parent cgroup.
func (c *Config) OCI() oci.Config {
	return oci.Config{StateDir: filepath.Join(c.Dirs.State, "oci"), RunDir: filepath.Join(c.Dirs.Run, "oci"),
		CgroupRoot: c.Dirs.CgroupRoot}
}

func (c *Config) setWireGuardPort(s string) error {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return fmt.Errorf("%q is not a port: want 1 to 65535", s)
	}
	c.PodNetwork.wireguard.Port = int(n)
	return nil
}

func (c *Config) setKeepalive(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 || d > 65535*time.Second || d%time.Second != 0 {
		return fmt.Errorf("%q: want whole seconds, at most 65535, such as 25s, or 0", s)
	}
	c.PodNetwork.wireguard.Keepalive = d
	return nil
}

func parseResources(s string) (v1.ResourceList, error) {
	out := v1.ResourceList{}
	for part := range strings.SplitSeq(s, ",") {
		name, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("%q is not NAME=QUANTITY", part)
		}
		q, err := resource.ParseQuantity(value)
		if err != nil || q.Sign() < 0 {
			return nil, fmt.Errorf("%q is not a valid quantity of %s", value, name)
		}
		out[v1.ResourceName(name)] = q
	}
	return out, nil
}

// maxHandlers is the maximum number of runtime handlers in the node's status.
const maxHandlers = 32

// addHandler adds s, a value of the flag --runtime-handler: NAME.
func (c *Config) addHandler(s string) error {
	name, err := oci.ParseHandler(s)
	if err != nil {
		return err
	}
	if msgs := validation.IsDNS1123Label(name); len(msgs) > 0 {
		return fmt.Errorf("%q is not a valid handler name: %s", name, msgs[0])
	}
	if len(c.Pods.RuntimeHandlers) >= maxHandlers {
		return fmt.Errorf("at most %d handler names are allowed", maxHandlers)
	}
	c.Pods.RuntimeHandlers = append(c.Pods.RuntimeHandlers, name)
	return nil
}

// addNodePortAddresses adds s, a value of the flag --nodeport-addresses: CIDR,...
func (c *Config) addNodePortAddresses(s string) error {
	for part := range strings.SplitSeq(s, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(part))
		if err != nil {
			return fmt.Errorf("%q is not a CIDR: want for example 10.0.0.0/8 or 192.0.2.7/32", part)
		}
		p = p.Masked()
		if slices.ContainsFunc(c.Services.NodePortAddresses, p.Overlaps) {
			return fmt.Errorf("%s overlaps another range of the flag", p)
		}
		c.Services.NodePortAddresses = append(c.Services.NodePortAddresses, p)
	}
	return nil
}

// addMirror adds s, a value of the flag --registry-mirror: REGISTRY=HOST[:PORT].
func (c *Config) addMirror(s string) error {
	registry, host, ok := strings.Cut(s, "=")
	if !ok || registry == "" || host == "" || strings.Contains(host, "/") {
		return fmt.Errorf("%q: want REGISTRY=HOST[:PORT], for example docker.io=mirror.example.com", s)
	}
	if c.Registries.Mirrors == nil {
		c.Registries.Mirrors = map[string][]string{}
	}
	c.Registries.Mirrors[registry] = append(c.Registries.Mirrors[registry], host)
	return nil
}

func parseLabels(s string) (map[string]string, error) {
	out := map[string]string{}
	for part := range strings.SplitSeq(s, ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		if msgs := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...); !ok ||
			len(msgs) > 0 {
			return nil, fmt.Errorf("%q is not KEY=VALUE %v", part, msgs)
		}
		out[key] = value
	}
	return out, nil
}

func parseTaints(s string) ([]v1.Taint, error) {
	var out []v1.Taint
	for part := range strings.SplitSeq(s, ",") {
		kv, effect, ok := strings.Cut(strings.TrimSpace(part), ":")
		key, value, _ := strings.Cut(kv, "=")
		t := v1.Taint{Key: key, Value: value, Effect: v1.TaintEffect(effect)}
		switch t.Effect {
		case v1.TaintEffectNoSchedule, v1.TaintEffectPreferNoSchedule, v1.TaintEffectNoExecute:
		default:
			ok = false
		}
		if msgs := validation.IsQualifiedName(key); !ok || len(msgs) > 0 {
			return nil, fmt.Errorf("%q is not KEY[=VALUE]:NoSchedule|PreferNoSchedule|NoExecute", part)
		}
		out = append(out, t)
	}
	return out, nil
}
