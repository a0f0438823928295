package node

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/dns"
	"keelson.dev/keelson/agent/network"
	"keelson.dev/keelson/agent/oci"
	"keelson.dev/keelson/agent/pod"
	"keelson.dev/keelson/agent/proxy"
	"keelson.dev/keelson/internal/logtail"
	"keelson.dev/keelson/internal/reservedspace"
	"keelson.dev/keelson/internal/saturate"
)

// Version is what the node says of its agent; it names the Kubernetes version whose pod behaviour it has.
const Version = "v1.37.2-keelson"

// Proxy keeps Service rules on the node in step with the cluster.
type Proxy interface {
	// Run works until ctx ends, and reports the revisions that its rules show.
	Run(ctx context.Context, objects agent.Objects, reports agent.Reporter) error
}

// Session is the connection to the control plane.
type Session interface {
	agent.Objects
	agent.Reporter
	Run(ctx context.Context) error
}

// leastFence is longer than any silence of a control plane that is well.
const leastFence = 10 * time.Second

// Config is everything an agent is started with.
type Config struct {
	// Release is the build of the program. The node says it as the version of its container runtime, which is the agent's own;
	// "": it says Version.
	Release string
	Servers []string // fleet addresses, host:port
	Token   string
	// TokenFile holds the token instead; it goes once the node has its certificate.
	TokenFile string
	NodeName  string
	NodeIPs   []string // first is the primary one; empty: found out

	StateDir, RunDir, LogDir string
	LogLinksDir              string
	CgroupRoot               string // cgroup below which all pods live
	CNIConfDir, CNIBinDir    string
	ArchivesDir              string // image archives imported at start
	RuntimeDir               string // folder of keelson-shim, keelson-oci and keelson-pause
	KubeletDir               string // folder whose layout third-party CSI drivers and device plugins know
	PluginRegistration       string // folder where they register; "" = plugins_registry below it
	DevicePlugins            string // folder where device plugins find the agent; "" = device-plugins below it
	PodResources             string // socket of the pod resources API; "" = pod-resources/kubelet.sock below it
	// FenceAfter is after which silence of the control plane pods with attached volumes are ended; 0 = never.
	FenceAfter time.Duration
	// StartUnconfirmedPods starts the pods of the checkpoint after a reboot before a control plane has confirmed them.
	StartUnconfirmedPods bool
	LocalVolumes         bool                 // serve volumes on the node's own disk (driver local.csi.keelson.dev)
	LocalVolumesLimit    int64                // bytes that they may have together; 0 = what the disk has
	DiskFloor            reservedspace.Amount // with less of its disk free the node is under pressure
	InodeFloor           reservedspace.Amount // with fewer inodes of the disk free it is, too; the zero value is Kubernetes' default
	MemoryFloor          reservedspace.Amount // with less memory available it is, too; the zero value is Kubernetes' default
	Capacity             v1.ResourceList
	Labels               map[string]string
	Taints               []v1.Taint
	RuntimeHandlers      []string // more names of this node's runtime for RuntimeClasses
	InsecureRegistries   []string
	RegistryMirrors      map[string][]string // registry, or "*" for those not named → hosts asked before it, in order
	SeccompDefault       bool
	PodSecurity          *pod.Ceiling // nil: every pod may run
	ClusterDNS           []string     // of pods; none: Service kube-system/kube-dns
	DNSLocal             string       // where the agent's DNS is served besides; "none": only at the Service's address
	LocalAPI             string       // of loopback, where connections lead to a replica that is ready; "none" or empty: nowhere
	ResolvConf           string
	MaxPods              int64
	PodPIDs              int64 // processes and threads that one pod may have; negative = no limit
	SingleProcessOOMKill bool  // out of memory a container loses one process, not all
	FailSwapOn           bool  // the agent does not start while the machine has active swap
	KubeletPort          int32 // of the node's own HTTPS server; 0: there is none

	// Network makes the pod network on top of the view; nil: only pods on the host's network run.
	Network        func(agent.Objects) agent.Network
	foreignNetwork func() bool // set with it: the network is somebody else's
	ownPods        func() bool // set with it: all pods have addresses of Keelson's own network configuration
	// SourceExempt are the namespaces whose pods may send under other addresses than their own; "*" is all of them.
	SourceExempt []string
	podNetwork   network.Mode
	wireguard    network.Encryption
	ownKey       *network.OwnKey // of wireguard, where that is the pod network
	unreached    func() string   // of which nodes pods are not reached, and why; set with Network
	// NetworkPolicy puts network policies in force, on the real pod network.
	NetworkPolicy bool
	dns           *dns.Server // set with it
	// Proxy may be nil: no Service rules.
	Proxy Proxy
	// ProxyMode is what the real one writes rules in; NodePortAddresses where it serves node ports, empty: everywhere.
	ProxyMode         proxy.Mode
	NodePortAddresses []netip.Prefix
	// ProxyHealthz is where load balancers in front of nodes ask for the state of the real proxy, HOST:PORT; "none" or
	// empty: nowhere.
	ProxyHealthz string
	announces    bool                                   // the node answers for addresses of load balancers
	proxyMetrics func(context.Context, io.Writer) error // nil: none
	// Extra runs beside the rest, by name: routes, DNS.
	Extra map[string]func(context.Context, agent.Objects, agent.Reporter) error

	// Parts replace the real ones where they are set: a fake node sets them all.
	Session Session
	Runtime agent.Runtime
	Images  agent.Images
	Volumes agent.Volumes
	Devices agent.Devices
	Prober  agent.Prober
	Trust   agent.Trust // of the node's own HTTPS server; the session's

	Log *slog.Logger
	// Recent are the last lines of Log, which the node's API shows; nil = none.
	Recent *logtail.Lines
	// Settings are the flags with their values, none of them a secret, which the node's API shows; nil = none.
	Settings map[string]string
}

// list is a flag that may be given several times, and as a comma-separated list.
type list struct{ to *[]string }

func (l list) String() string {
	if l.to == nil { // the flag package asks a zero value
		return ""
	}
	return strings.Join(*l.to, ",")
}
func (l list) Set(s string) error {
	for part := range strings.SplitSeq(s, ",") {
		if part = strings.TrimSpace(part); part != "" {
			*l.to = append(*l.to, part)
		}
	}
	return nil
}

// RecentLog is how much of its log an agent remembers, in bytes.
const RecentLog = 128 << 10

// Flags declares the command line on fs and returns the configuration that it fills.
func Flags(fs *flag.FlagSet) *Config {
	c := &Config{}
	host, err := os.Hostname()
	if err != nil {
		host = "" // then --node-name has to be given: Complete says so
	}
	fs.Var(list{&c.Servers}, "server", "fleet address of a control-plane replica, HOST:PORT (repeatable)")
	fs.StringVar(&c.Token, "token", "", "join token; needed until the node has its certificate")
	fs.StringVar(&c.TokenFile, "token-file", "", "file that holds the join token; it is removed once the node has its certificate")
	fs.StringVar(&c.NodeName, "node-name", strings.ToLower(host), "name of this node")
	fs.Var(list{&c.NodeIPs}, "node-ip", "address of this node; found out when not given")
	fs.StringVar(&c.StateDir, "state-dir", "/var/lib/keelson", "folder that survives a reboot")
	fs.StringVar(&c.RunDir, "run-dir", "/run/keelson", "folder that a reboot empties")
	fs.StringVar(&c.LogDir, "log-dir", "/var/log/pods", "folder of container logs")
	fs.StringVar(&c.LogLinksDir, "log-links-dir", "/var/log/containers",
		"folder in which log shippers find a link to the log of each container; empty: no links")
	fs.StringVar(&c.CgroupRoot, "cgroup-root", "/keelson", "cgroup below which all pods live")
	fs.StringVar(&c.CNIConfDir, "cni-conf-dir", "/etc/cni/net.d", "folder of network configurations; one in it wins over Keelson's own")
	fs.StringVar(&c.CNIBinDir, "cni-bin-dir", "/opt/cni/bin", "folder of CNI plugins")
	spokenFlag(fs, "pod-network", "how pods reach those of other nodes: routes to nodes on the same link and VXLAN to all others (auto), routes alone (routes), "+
		"VXLAN alone (vxlan) or WireGuard, which encrypts (wireguard); the same on all nodes (default auto)", func(s string) (err error) {
		c.podNetwork, err = network.ParseMode(s)
		return err
	})
	c.wireguard.Port = network.DefaultWireGuardPort
	spokenFlag(fs, "wireguard-port", fmt.Sprintf("UDP port of WireGuard between nodes; the same on all nodes (default %d)", network.DefaultWireGuardPort),
		func(s string) error { return c.setWireGuardPort(s) })
	spokenFlag(fs, "wireguard-keepalive", "how often a node says something to each other one by WireGuard, such as 25s, where a firewall between forgets who spoke; "+
		"0: only when pods do (default 0)", func(s string) error { return c.setKeepalive(s) })
	fs.StringVar(&c.ArchivesDir, "archives-dir", "", "folder of image archives to import (default STATE-DIR/images.d)")
	fs.StringVar(&c.RuntimeDir, "runtime-dir", "", "folder of keelson-shim, keelson-oci and keelson-pause (default: that of this program)")
	fs.StringVar(&c.KubeletDir, "kubelet-dir", "/var/lib/kubelet",
		"folder where CSI drivers and device plugins find kubelet's: plugins, plugins_registry, pods and device-plugins")
	fs.StringVar(&c.PluginRegistration, "plugin-registration-dir", "",
		"folder where drivers and plugins wait to be registered (default KUBELET-DIR/plugins_registry)")
	fs.BoolVar(&c.StartUnconfirmedPods, "start-unconfirmed-pods", false,
		"after a reboot of the machine start all pods of the checkpoint before a control plane has confirmed that they are "+
			"assigned to this node: a pod that was replaced meanwhile runs twice until then; false starts only pods of "+
			"DaemonSets and static pods")
	fs.DurationVar(&c.FenceAfter, "fence-after", 20*time.Second, "end pods with attached volumes when no control plane that can write has been heard for so long, whole seconds: then other nodes may have the volumes; 0 = never, and then a lost node's volumes move only when somebody says that it is out of service; "+
		"a longer time than before holds once the control plane has received it")
	fs.BoolVar(&c.LocalVolumes, "local-volumes", true, "serve volumes on this node's own disk, below STATE-DIR/local-volumes (driver local.csi.keelson.dev)")
	c.roomFlags(fs)
	fs.Var(list{&c.InsecureRegistries}, "insecure-registry", "registry HOST[:PORT] spoken to over plain HTTP (repeatable)")
	spokenFlag(fs, "registry-mirror", "REGISTRY=HOST[:PORT]: a host that is asked for the images of a registry before the registry itself; "+
		"* stands for every registry that is not named (repeatable, tried in order)", func(s string) error { return c.addMirror(s) })
	fs.BoolVar(&c.NetworkPolicy, "network-policy", true,
		"put network policies in force; false leaves that to another product (one with a configuration in --cni-conf-dir does it by itself)")
	spokenFlag(fs, "source-check-exempt-namespaces", "namespaces whose pods may send under IP and hardware addresses that are not their own, NAMESPACE,..., "+
		"for VRRP, VPN servers and routers; * is all namespaces (repeatable; default: none)", func(s string) error { return c.addSourceExempt(s) })
	fs.BoolVar(&c.SeccompDefault, "seccomp-default", false, "give containers without a seccomp profile the runtime's default")
	spokenFlag(fs, "pod-security", "most that pods may ask for on this node: privileged, baseline or restricted, with :VERSION if need be (default privileged)",
		func(s string) (err error) {
			c.PodSecurity, err = pod.ParseCeiling(s)
			return err
		})
	c.ProxyMode = proxy.ModeNFTables
	spokenFlag(fs, "proxy-mode", "what Service rules are written in: nftables, iptables, ipvs, or none where somebody else makes Services reachable; "+
		"rules of another mode are removed (default nftables)", func(s string) (err error) {
		c.ProxyMode, err = proxy.ParseMode(s)
		return err
	})
	spokenFlag(fs, "nodeport-addresses", "ranges of the node's addresses at which node ports are served, CIDR,... (repeatable; default: all but loopback)",
		func(s string) error { return c.addNodePortAddresses(s) })
	fs.StringVar(&c.ProxyHealthz, "proxy-healthz-address", fmt.Sprintf(":%d", proxyHealthzPort),
		"address where load balancers in front of nodes ask whether the node serves Services (/healthz, /livez), [ADDRESS]:PORT; "+
			"none: nowhere, as with --proxy-mode=none")
	fs.Var(list{&c.ClusterDNS}, "cluster-dns", "DNS server of the cluster for pods (repeatable; default: the address of Service kube-system/kube-dns, where there is one)")
	fs.StringVar(&c.DNSLocal, "dns-local-address", dns.LinkLocal.String(),
		"address of this node at which the agent's DNS is served besides that of Service kube-system/kube-dns; none: only there")
	fs.StringVar(&c.LocalAPI, "local-api-address", "127.0.0.1:6443",
		"address of this node's loopback, ADDRESS:PORT, from where connections are led on to a replica of the API that is ready; none: there is no such")
	fs.StringVar(&c.ResolvConf, "resolv-conf", "/etc/resolv.conf", "resolver configuration that pods inherit; of servers at loopback, which no pod reaches, those that systemd-resolved asks")
	spokenFlag(fs, "runtime-handler",
		"another name by which RuntimeClasses may ask for this node's runtime; it has keelson and runc anyway (repeatable)", c.addHandler)
	fs.Int64Var(&c.MaxPods, "max-pods", 110, "how many pods the node takes")
	fs.Int64Var(&c.PodPIDs, "pod-max-pids", 4096, "how many processes and threads one pod may have; -1: no limit")
	fs.BoolVar(&c.SingleProcessOOMKill, "single-process-oom-kill", false,
		"when a container is out of memory, end the one process that the kernel chose and not all of them (with cgroup v1 it is always one)")
	fs.BoolVar(&c.FailSwapOn, "fail-swap-on", false, "do not start while swap is on at this machine")
	spokenFlag(fs, "kubelet-port", "port of the node's own HTTPS server: metrics, statistics and pods, as kubelet serves them; 0: none (default 10250)",
		func(s string) error {
			n, err := strconv.ParseUint(s, 10, 16)
			c.KubeletPort = int32(n)
			return err
		})
	c.KubeletPort = 10250
	spokenFlag(fs, "capacity", "resources to report instead of the machine's: cpu=2,memory=4Gi", func(s string) (err error) {
		c.Capacity, err = parseResources(s)
		return err
	})
	spokenFlag(fs, "node-labels", "labels of the node: KEY=VALUE,...", func(s string) (err error) {
		c.Labels, err = parseLabels(s)
		return err
	})
	spokenFlag(fs, "taints", "taints of the node: KEY[=VALUE]:EFFECT,...", func(s string) (err error) {
		c.Taints, err = parseTaints(s)
		return err
	})
	return c
}

// roomFlags are those of what has to be left of the machine's disk and memory.
func (c *Config) roomFlags(fs *flag.FlagSet) {
	spokenFlag(fs, "disk-pressure-below", "free space of the disk of STATE-DIR below which the node counts as short of disk, takes no more pods and evicts some, a share or a size, "+
		"such as 5% or 20Gi; volumes on the disk leave so much, images half of it, and those that nothing uses are removed while less than half as much again is free (default "+reservedspace.Default.String()+")", func(s string) (err error) {
		c.DiskFloor, err = reservedspace.Parse(s)
		return err
	})
	spokenFlag(fs, "inode-pressure-below", "free inodes of the disk of STATE-DIR below which the node counts as short of disk as well, a share or a number, such as 3% or 50000; "+
		"images that nothing uses are removed while less than half as much again is free (default "+defaultInodeFloor.String()+")", func(s string) (err error) {
		c.InodeFloor, err = parseInodeFloor(s)
		return err
	})
	spokenFlag(fs, "memory-pressure-below", "available memory below which the node counts as short of memory: it takes no more pods that request none, and evicts pods "+
		"until there is enough, a size or a share, such as 500Mi or 5% (default "+defaultMemoryFloor.String()+")", func(s string) (err error) {
		c.MemoryFloor, err = parseMemoryFloor(s)
		return err
	})
	spokenFlag(fs, "local-volumes-limit", "how much all of them may have together, such as 100Gi (default: what the disk has, but for what --disk-pressure-below keeps)", func(s string) error {
		q, err := resource.ParseQuantity(s)
		if err != nil || q.Sign() <= 0 {
			return fmt.Errorf("%q is no size above zero", s)
		}
		c.LocalVolumesLimit = saturate.Value(&q)
		return nil
	})
}

// Check says what is missing or wrong, naming the flag, as far as it does not depend on what the machine has. It changes nothing.
func (c *Config) Check() error {
	if msgs := validation.IsDNS1123Subdomain(c.NodeName); len(msgs) > 0 {
		return fmt.Errorf("--node-name %q: %s", c.NodeName, msgs[0])
	}
	if c.Session == nil && len(c.Servers) == 0 {
		return errors.New("--server is missing: the address of a control-plane replica, HOST:PORT")
	}
	if a, err := netip.ParseAddr(c.DNSLocal); err != nil && c.DNSLocal != "" && c.DNSLocal != "none" || err == nil && !a.IsLinkLocalUnicast() && !a.IsLoopback() {
		return fmt.Errorf("--dns-local-address %q: want a link-local address such as %s, or none", c.DNSLocal, dns.LinkLocal)
	}
	if c.LocalAPI != "" && c.LocalAPI != "none" {
		if a, err := netip.ParseAddrPort(c.LocalAPI); err != nil || !a.Addr().IsLoopback() || a.Port() == 0 {
			return fmt.Errorf("--local-api-address %q: want an address of loopback and a port, such as 127.0.0.1:6443, or none", c.LocalAPI)
		}
	}
	if _, err := healthzAddress(c.ProxyHealthz); err != nil {
		return err
	}
	if c.FenceAfter != 0 && (c.FenceAfter < leastFence || c.FenceAfter%time.Second != 0) {
		return fmt.Errorf("--fence-after %s: want whole seconds, %s at least, or 0 for never", c.FenceAfter, leastFence)
	}
	return nil
}

// Complete fills in what follows from the rest, after Check.
func (c *Config) Complete() error {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if err := c.Check(); err != nil {
		return err
	}
	if c.FailSwapOn {
		if err := checkSwap(procSwaps); err != nil {
			return err
		}
	}
	if c.MaxPods == 0 {
		c.MaxPods = 110
	}
	if c.ArchivesDir == "" {
		c.ArchivesDir = filepath.Join(c.StateDir, "images.d")
	}
	if c.PluginRegistration == "" && c.KubeletDir != "" {
		c.PluginRegistration = filepath.Join(c.KubeletDir, "plugins_registry")
	}
	if c.DevicePlugins == "" && c.KubeletDir != "" {
		c.DevicePlugins = filepath.Join(c.KubeletDir, "device-plugins")
	}
	if c.PodResources == "" && c.KubeletDir != "" {
		c.PodResources = filepath.Join(c.KubeletDir, "pod-resources", "kubelet.sock")
	}
	if c.RuntimeDir == "" && c.Runtime == nil {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("--runtime-dir is not given, and the folder of this program is not known: %w", err)
		}
		c.RuntimeDir = filepath.Dir(self)
	}
	if len(c.NodeIPs) == 0 {
		ip, err := primaryAddress()
		if err != nil {
			return fmt.Errorf("--node-ip is not given: %w", err)
		}
		c.NodeIPs = []string{ip}
	}
	return nil
}

func (c *Config) paths() agent.Paths {
	return agent.Paths{State: c.StateDir, Run: c.RunDir, Logs: c.LogDir, LogLinks: c.LogLinksDir, CNIConf: c.CNIConfDir, CNIBin: c.CNIBinDir,
		Archives: c.ArchivesDir, Kubelet: c.KubeletDir}
}

// OCI is where the runtime's containers lie.
func (c *Config) OCI() oci.Config {
	return oci.Config{StateDir: filepath.Join(c.StateDir, "oci"), RunDir: filepath.Join(c.RunDir, "oci"), CgroupRoot: c.CgroupRoot}
}

func (c *Config) setWireGuardPort(s string) error {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return fmt.Errorf("%q is no port: want 1 to 65535", s)
	}
	c.wireguard.Port = int(n)
	return nil
}

func (c *Config) setKeepalive(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 || d > 65535*time.Second || d%time.Second != 0 {
		return fmt.Errorf("%q: want whole seconds, 65535 at most, such as 25s, or 0", s)
	}
	c.wireguard.Keepalive = d
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
			return nil, fmt.Errorf("%q is no quantity of %s", value, name)
		}
		out[v1.ResourceName(name)] = q
	}
	return out, nil
}

// maxHandlers bounds what the status of a node says of its handlers.
const maxHandlers = 32

// addHandler reads NAME.
func (c *Config) addHandler(s string) error {
	name, err := oci.ParseHandler(s)
	if err != nil {
		return err
	}
	if msgs := validation.IsDNS1123Label(name); len(msgs) > 0 {
		return fmt.Errorf("%q is no name of a handler: %s", name, msgs[0])
	}
	if len(c.RuntimeHandlers) >= maxHandlers {
		return fmt.Errorf("a node has %d names of its own at most", maxHandlers)
	}
	c.RuntimeHandlers = append(c.RuntimeHandlers, name)
	return nil
}

// addNodePortAddresses reads CIDR,...
func (c *Config) addNodePortAddresses(s string) error {
	for part := range strings.SplitSeq(s, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(part))
		if err != nil {
			return fmt.Errorf("%q is no range of addresses: want for example 10.0.0.0/8 or 192.0.2.7/32", part)
		}
		p = p.Masked()
		if slices.ContainsFunc(c.NodePortAddresses, p.Overlaps) {
			return fmt.Errorf("%s overlaps a range that is given already", p)
		}
		c.NodePortAddresses = append(c.NodePortAddresses, p)
	}
	return nil
}

// addMirror reads REGISTRY=HOST[:PORT].
func (c *Config) addMirror(s string) error {
	registry, host, ok := strings.Cut(s, "=")
	if !ok || registry == "" || host == "" || strings.Contains(host, "/") {
		return fmt.Errorf("%q: want REGISTRY=HOST[:PORT], for example docker.io=mirror.example.com", s)
	}
	if c.RegistryMirrors == nil {
		c.RegistryMirrors = map[string][]string{}
	}
	c.RegistryMirrors[registry] = append(c.RegistryMirrors[registry], host)
	return nil
}

func parseLabels(s string) (map[string]string, error) {
	out := map[string]string{}
	for part := range strings.SplitSeq(s, ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		if msgs := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...); !ok || len(msgs) > 0 {
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
