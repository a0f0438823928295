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
	Trust   agent.ServerTrust // of the node's own HTTPS server; the session's

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
	fs.Var(list{&c.Servers}, "server", "address of a control-plane replica for agents, HOST:PORT (repeatable)")
	fs.StringVar(&c.Token, "token", "", "join token; required until the node has its certificate")
	fs.StringVar(&c.TokenFile, "token-file", "", "file with the join token; it is removed after the node has received its certificate")
	fs.StringVar(&c.NodeName, "node-name", strings.ToLower(host), "name of this node")
	fs.Var(list{&c.NodeIPs}, "node-ip", "IP address of this node (repeatable; default: detected)")
	fs.StringVar(&c.StateDir, "state-dir", "/var/lib/keelson", "directory for state that persists across reboots")
	fs.StringVar(&c.RunDir, "run-dir", "/run/keelson", "directory for state that is cleared at reboot")
	fs.StringVar(&c.LogDir, "log-dir", "/var/log/pods", "directory of container logs")
	fs.StringVar(&c.LogLinksDir, "log-links-dir", "/var/log/containers",
		"directory in which a link to the log of each container is created, for log shippers; empty disables the links")
	fs.StringVar(&c.CgroupRoot, "cgroup-root", "/keelson", "cgroup below which all pods run")
	fs.StringVar(&c.CNIConfDir, "cni-conf-dir", "/etc/cni/net.d", "directory of CNI configurations; a configuration in it is used instead of Keelson's pod network")
	fs.StringVar(&c.CNIBinDir, "cni-bin-dir", "/opt/cni/bin", "directory of CNI plugins")
	spokenFlag(fs, "pod-network", "network between pods of different nodes: auto (routes to nodes on the same link, VXLAN to all others), "+
		"routes, vxlan, or wireguard (encrypted); must be the same on all nodes (default auto)", func(s string) (err error) {
		c.podNetwork, err = network.ParseMode(s)
		return err
	})
	c.wireguard.Port = network.DefaultWireGuardPort
	spokenFlag(fs, "wireguard-port", fmt.Sprintf("UDP port of WireGuard; must be the same on all nodes (default %d)", network.DefaultWireGuardPort),
		func(s string) error { return c.setWireGuardPort(s) })
	spokenFlag(fs, "wireguard-keepalive", "interval of WireGuard keepalives to all other nodes, such as 25s, if a firewall between the nodes drops "+
		"idle connections; 0 disables keepalives (default 0)", func(s string) error { return c.setKeepalive(s) })
	fs.StringVar(&c.ArchivesDir, "archives-dir", "", "directory of image archives to import (default STATE-DIR/images.d)")
	fs.StringVar(&c.RuntimeDir, "runtime-dir", "", "directory of keelson-shim, keelson-oci and keelson-pause (default: the directory of this program)")
	fs.StringVar(&c.KubeletDir, "kubelet-dir", "/var/lib/kubelet",
		"directory in which CSI drivers and device plugins expect kubelet's directories plugins, "+
			"plugins_registry, pods and device-plugins")
	fs.StringVar(&c.PluginRegistration, "plugin-registration-dir", "",
		"directory in which CSI drivers and plugins register (default KUBELET-DIR/plugins_registry)")
	fs.BoolVar(&c.StartUnconfirmedPods, "start-unconfirmed-pods", false,
		"after a reboot of the machine, start all pods of the checkpoint before the control plane has confirmed "+
			"that they are assigned to this node; a pod that was replaced in the meantime then runs twice. If false, "+
			"only pods of DaemonSets and static pods are started")
	fs.DurationVar(&c.FenceAfter, "fence-after", 20*time.Second,
		"time without contact to a writable control plane after which pods with attached volumes are stopped, so "+
			"that other nodes can use the volumes; whole seconds; 0 disables this, and the volumes of a lost node "+
			"then move only after the node is marked out of service; a longer time takes effect after the control "+
			"plane has received it")
	fs.BoolVar(&c.LocalVolumes, "local-volumes", true, "provide volumes on this node's own disk in STATE-DIR/local-volumes (driver local.csi.keelson.dev)")
	c.roomFlags(fs)
	fs.Var(list{&c.InsecureRegistries}, "insecure-registry", "registry, HOST[:PORT], that is accessed over plain HTTP (repeatable)")
	spokenFlag(fs, "registry-mirror", "mirror of a registry, REGISTRY=HOST[:PORT], from which images are pulled first; REGISTRY '*' stands for "+
		"all registries without a mirror of their own (repeatable, tried in order)", func(s string) error { return c.addMirror(s) })
	fs.BoolVar(&c.NetworkPolicy, "network-policy", true,
		"enforce network policies; set to false if another product enforces them, unless that product has a "+
			"configuration in --cni-conf-dir")
	spokenFlag(fs, "source-check-exempt-namespaces", "namespaces, NAMESPACE,..., whose pods may send packets from IP and MAC addresses other than their own, "+
		"for VRRP, VPN servers and routers; '*' stands for all namespaces (repeatable; default: none)", func(s string) error { return c.addSourceExempt(s) })
	fs.BoolVar(&c.SeccompDefault, "seccomp-default", false, "use the runtime's default seccomp profile for containers without a profile")
	spokenFlag(fs, "pod-security", "least restrictive Pod Security level that this node accepts: privileged, baseline or restricted, "+
		"optionally with :VERSION (default privileged)",
		func(s string) (err error) {
			c.PodSecurity, err = pod.ParseCeiling(s)
			return err
		})
	c.ProxyMode = proxy.ModeNFTables
	spokenFlag(fs, "proxy-mode", "mode of the rules for Services: nftables, iptables, ipvs, or none if another product provides Services; "+
		"rules of other modes are removed (default nftables)", func(s string) (err error) {
		c.ProxyMode, err = proxy.ParseMode(s)
		return err
	})
	spokenFlag(fs, "nodeport-addresses", "CIDRs,... of the node's addresses that accept connections to node ports (repeatable; default: all but "+
		"loopback)",
		func(s string) error { return c.addNodePortAddresses(s) })
	fs.StringVar(&c.ProxyHealthz, "proxy-healthz-address", fmt.Sprintf(":%d", proxyHealthzPort),
		"address, [ADDRESS]:PORT, of the health endpoints /healthz and /livez for load balancers in front of the "+
			"nodes; none disables them, as does --proxy-mode=none")
	fs.Var(list{&c.ClusterDNS}, "cluster-dns", "DNS server for pods (repeatable; default: the address of Service kube-system/kube-dns, if it exists)")
	fs.StringVar(&c.DNSLocal, "dns-local-address", dns.LinkLocal.String(),
		"address of this node at which the agent's DNS server also listens, in addition to the address of "+
			"Service kube-system/kube-dns; none disables it")
	fs.StringVar(&c.LocalAPI, "local-api-address", "127.0.0.1:6443",
		"loopback address, ADDRESS:PORT, at which the agent proxies connections to a ready API server; none "+
			"disables the proxy")
	fs.StringVar(&c.ResolvConf, "resolv-conf", "/etc/resolv.conf",
		"resolver configuration for pods; if it has only servers at loopback addresses, those of "+
			"systemd-resolved are used")
	spokenFlag(fs, "runtime-handler",
		"additional handler name of RuntimeClasses for this node's runtime, which always has the names keelson "+
			"and runc (repeatable)", c.addHandler)
	fs.Int64Var(&c.MaxPods, "max-pods", 110, "maximum number of pods on this node")
	fs.Int64Var(&c.PodPIDs, "pod-max-pids", 4096, "maximum number of processes and threads of a pod; -1 for no limit")
	fs.BoolVar(&c.SingleProcessOOMKill, "single-process-oom-kill", false,
		"when a container is out of memory, kill only the process that the kernel selects, and not all of its "+
			"processes (with cgroup v1 it is always one)")
	fs.BoolVar(&c.FailSwapOn, "fail-swap-on", false, "refuse to start if swap is enabled on this machine")
	spokenFlag(fs, "kubelet-port", "port of the node's HTTPS server, which serves health, metrics, statistics and pods as kubelet does; 0 "+
		"disables it (default 10250)",
		func(s string) error {
			n, err := strconv.ParseUint(s, 10, 16)
			c.KubeletPort = int32(n)
			return err
		})
	c.KubeletPort = 10250
	spokenFlag(fs, "capacity", "resources that this node reports instead of the machine's, such as cpu=2,memory=4Gi", func(s string) (err error) {
		c.Capacity, err = parseResources(s)
		return err
	})
	spokenFlag(fs, "node-labels", "labels of the Node, KEY=VALUE,...", func(s string) (err error) {
		c.Labels, err = parseLabels(s)
		return err
	})
	spokenFlag(fs, "taints", "taints of the Node, KEY[=VALUE]:EFFECT,...", func(s string) (err error) {
		c.Taints, err = parseTaints(s)
		return err
	})
	return c
}

// roomFlags are those of what has to be left of the machine's disk and memory.
func (c *Config) roomFlags(fs *flag.FlagSet) {
	spokenFlag(fs, "disk-pressure-below", "free space on the disk of STATE-DIR below which the node has disk pressure, accepts no pods and evicts "+
		"pods, as a percentage or a size, such as 5% or 20Gi. Local volumes keep this much free, and images half "+
		"of it. Unused images are deleted if less than 1.5 times this much is free (default "+
		reservedspace.Default.String()+
		")", func(s string) (err error) {
		c.DiskFloor, err = reservedspace.Parse(s)
		return err
	})
	spokenFlag(fs, "inode-pressure-below", "free inodes on the disk of STATE-DIR below which the node has disk pressure, as a percentage or a "+
		"number, such as 3% or 50000. Unused images are deleted if less than 1.5 times this many are free (default "+
		defaultInodeFloor.String()+
		")", func(s string) (err error) {
		c.InodeFloor, err = parseInodeFloor(s)
		return err
	})
	spokenFlag(fs, "memory-pressure-below", "available memory below which the node has memory pressure, accepts no pods without memory requests, and "+
		"evicts pods until enough memory is available; as a size or a percentage, such as 500Mi or 5% (default "+
		defaultMemoryFloor.String()+
		")", func(s string) (err error) {
		c.MemoryFloor, err = parseMemoryFloor(s)
		return err
	})
	spokenFlag(fs, "local-volumes-limit", "maximum total size of the local volumes, such as 100Gi (default: the size of the disk without the space "+
		"that --disk-pressure-below reserves)", func(s string) error {
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
