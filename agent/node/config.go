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

// Version is the kubelet version in the node's status. Its first part is the Kubernetes version
// with the pod behavior that the agent implements.
const Version = "v1.37.2-keelson"

// Proxy maintains the Service rules in the kernel of this node.
type Proxy interface {
	// Run maintains the rules until ctx ends. It reports the revision that the rules have applied.
	Run(ctx context.Context, objects agent.Objects, reports agent.Reporter) error
}

// Session is the agent's connection to the control plane.
type Session interface {
	agent.Objects
	agent.Reporter
	Run(ctx context.Context) error
}

// minFence is the minimum of Config.FenceAfter. It is longer than any pause between two responses
// of a healthy control plane.
const minFence = 10 * time.Second

// Config configures a node agent.
type Config struct {
	// Release is the build of the program. The node reports it as the version of its container
	// runtime, which is part of the agent. "" = Version.
	Release string
	Servers []string // fleet addresses of the control plane, host:port
	Token   string
	// TokenFile is the file with the token, used if Token is empty. It is removed once the node has
	// its certificate.
	TokenFile string
	NodeName  string
	NodeIPs   []string // the first is the primary address; empty: detected

	StateDir, RunDir, LogDir string
	LogLinksDir              string
	CgroupRoot               string // parent cgroup of all pods
	CNIConfDir, CNIBinDir    string
	ArchivesDir              string // image archives imported at start
	RuntimeDir               string // folder of keelson-shim, keelson-oci and keelson-pause
	KubeletDir               string // folder with the kubelet's layout, which CSI drivers and device plugins expect
	PluginRegistration       string // folder in which drivers register; "" = plugins_registry in KubeletDir
	DevicePlugins            string // folder in which device plugins find the agent's socket; "" = device-plugins in KubeletDir
	PodResources             string // socket of the pod resources API; "" = pod-resources/kubelet.sock in KubeletDir
	// FenceAfter is the time of disconnection after which pods with attached volumes are
	// terminated; 0 = never.
	FenceAfter time.Duration
	// StartUnconfirmedPods makes the agent start the pods of its checkpoint after a reboot before a
	// control plane has confirmed them.
	StartUnconfirmedPods bool
	LocalVolumes         bool                 // serve volumes on the node's own disk (driver local.csi.keelson.dev)
	LocalVolumesLimit    int64                // limit of their total size in bytes; 0 = the size of the disk
	DiskFloor            reservedspace.Amount // with less free disk space, the node has disk pressure
	InodeFloor           reservedspace.Amount // with fewer free inodes, the node has disk pressure; zero value: Kubernetes' default
	MemoryFloor          reservedspace.Amount // with less available memory, the node has memory pressure; zero value: Kubernetes' default
	Capacity             v1.ResourceList
	Labels               map[string]string
	Taints               []v1.Taint
	RuntimeHandlers      []string // additional handler names for RuntimeClasses
	InsecureRegistries   []string
	RegistryMirrors      map[string][]string // registry, or "*" for all others → mirror hosts in the order in which they are tried
	SeccompDefault       bool
	PodSecurity          *pod.Ceiling // nil: all pods are allowed
	ClusterDNS           []string     // DNS servers of pods; empty: Service kube-system/kube-dns
	DNSLocal             string       // additional address of the agent's DNS server; "none": only the Service's address
	LocalAPI             string       // loopback address that proxies to a ready replica of the API; "none" or empty: disabled
	ResolvConf           string
	MaxPods              int64
	PodPIDs              int64 // limit of processes and threads per pod; negative = no limit
	SingleProcessOOMKill bool  // out of memory, the kernel kills one process of a container, not all
	FailSwapOn           bool  // do not start while the machine has active swap
	KubeletPort          int32 // port of the node's HTTPS server; 0: disabled

	// Network returns the pod network for the objects of the view; nil: only pods with hostNetwork
	// run.
	Network          func(agent.Objects) agent.Network
	foreignNetwork   func() bool // set by WithNetwork: reports whether another network product has a CNI configuration
	hasOwnPodNetwork func() bool // set by WithNetwork: reports whether all pods have addresses of Keelson's network configuration
	// SourceExempt are the namespaces in which pods may send from source addresses of others. "*"
	// means all namespaces.
	SourceExempt     []string
	podNetwork       network.Mode
	wireguard        network.Encryption
	ownKey           *network.OwnKey // key for podNetwork WireGuard, otherwise nil
	unreachableNodes func() string   // set by WithNetwork: nodes with unreachable pods, and why
	// NetworkPolicy enables network policies on the real pod network.
	NetworkPolicy bool
	dns           *dns.Server // set by WithNetwork
	// Proxy is the Service proxy; nil: no Service rules.
	Proxy Proxy
	// ProxyMode is the mode of the real proxy. NodePortAddresses are the ranges in which it serves
	// node ports; empty: all addresses.
	ProxyMode         proxy.Mode
	NodePortAddresses []netip.Prefix
	// ProxyHealthz is the address of the real proxy's health check for external load balancers,
	// HOST:PORT; "none" or empty: disabled.
	ProxyHealthz string
	announcesL2  bool                                   // the node can announce load balancer addresses
	proxyMetrics func(context.Context, io.Writer) error // nil: no metrics
	// Extra are additional parts of the agent by name, for example routes and DNS.
	Extra map[string]func(context.Context, agent.Objects, agent.Reporter) error

	// The following parts replace the real ones if they are set. A fake node sets all of them.
	Session Session
	Runtime agent.Runtime
	Images  agent.Images
	Volumes agent.Volumes
	Devices agent.Devices
	Prober  agent.Prober
	Trust   agent.ServerTrust // of the node's HTTPS server; default: the session

	Log *slog.Logger
	// Recent has the last lines of Log for the node's API; nil = none.
	Recent *logtail.Lines
	// Settings are the flags and their values for the node's API, without secrets; nil = none.
	Settings map[string]string
}

// stringList is a flag.Value that appends to a list. The flag may be repeated, and each value may
// be a comma-separated list.
type stringList struct{ values *[]string }

func (l stringList) String() string {
	if l.values == nil { // the flag package calls String of a zero value
		return ""
	}
	return strings.Join(*l.values, ",")
}
func (l stringList) Set(s string) error {
	for part := range strings.SplitSeq(s, ",") {
		if part = strings.TrimSpace(part); part != "" {
			*l.values = append(*l.values, part)
		}
	}
	return nil
}

// RecentLog is the size in bytes of the end of its log that an agent keeps in memory, for the
// node's API.
const RecentLog = 128 << 10

// Flags declares the agent's command-line flags on fs. It returns the configuration that parsing
// the flags sets.
func Flags(fs *flag.FlagSet) *Config {
	c := &Config{}
	host, err := os.Hostname()
	if err != nil {
		host = "" // --node-name is required then; see Check
	}
	fs.Var(stringList{&c.Servers}, "server", "address of a control-plane replica for agents, HOST:PORT (repeatable)")
	fs.StringVar(&c.Token, "token", "", "join token; required until the node has its certificate")
	fs.StringVar(&c.TokenFile, "token-file", "", "file with the join token; it is removed after the node has received its certificate")
	fs.StringVar(&c.NodeName, "node-name", strings.ToLower(host), "name of this node")
	fs.Var(stringList{&c.NodeIPs}, "node-ip", "IP address of this node (repeatable; default: detected)")
	fs.StringVar(&c.StateDir, "state-dir", "/var/lib/keelson", "directory for state that persists across reboots")
	fs.StringVar(&c.RunDir, "run-dir", "/run/keelson", "directory for state that is cleared at reboot")
	fs.StringVar(&c.LogDir, "log-dir", "/var/log/pods", "directory of container logs")
	fs.StringVar(&c.LogLinksDir, "log-links-dir", "/var/log/containers",
		"directory in which a link to the log of each container is created, for log shippers; empty disables the links")
	fs.StringVar(&c.CgroupRoot, "cgroup-root", "/keelson", "cgroup below which all pods run")
	fs.StringVar(&c.CNIConfDir, "cni-conf-dir", "/etc/cni/net.d", "directory of CNI configurations; a configuration in it is used instead of Keelson's pod network")
	fs.StringVar(&c.CNIBinDir, "cni-bin-dir", "/opt/cni/bin", "directory of CNI plugins")
	declareFlag(fs, "pod-network", "network between pods of different nodes: auto (routes to nodes on the same link, VXLAN to all others), "+
		"routes, vxlan, or wireguard (encrypted); must be the same on all nodes (default auto)", func(s string) (err error) {
		c.podNetwork, err = network.ParseMode(s)
		return err
	})
	c.wireguard.Port = network.DefaultWireGuardPort
	declareFlag(fs, "wireguard-port", fmt.Sprintf("UDP port of WireGuard; must be the same on all nodes (default %d)", network.DefaultWireGuardPort),
		func(s string) error { return c.setWireGuardPort(s) })
	declareFlag(fs, "wireguard-keepalive", "interval of WireGuard keepalives to all other nodes, such as 25s, if a firewall between the nodes drops "+
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
	c.declareReserveFlags(fs)
	fs.Var(stringList{&c.InsecureRegistries}, "insecure-registry", "registry, HOST[:PORT], that is accessed over plain HTTP (repeatable)")
	declareFlag(fs, "registry-mirror", "mirror of a registry, REGISTRY=HOST[:PORT], from which images are pulled first; REGISTRY '*' stands for "+
		"all registries without a mirror of their own (repeatable, tried in order)", func(s string) error { return c.addMirror(s) })
	fs.BoolVar(&c.NetworkPolicy, "network-policy", true,
		"enforce network policies; set to false if another product enforces them, unless that product has a "+
			"configuration in --cni-conf-dir")
	declareFlag(fs, "source-check-exempt-namespaces", "namespaces, NAMESPACE,..., whose pods may send packets from IP and MAC addresses other than their own, "+
		"for VRRP, VPN servers and routers; '*' stands for all namespaces (repeatable; default: none)", func(s string) error { return c.addSourceExempt(s) })
	fs.BoolVar(&c.SeccompDefault, "seccomp-default", false, "use the runtime's default seccomp profile for containers without a profile")
	declareFlag(fs, "pod-security", "least restrictive Pod Security level that this node accepts: privileged, baseline or restricted, "+
		"optionally with :VERSION (default privileged)",
		func(s string) (err error) {
			c.PodSecurity, err = pod.ParseCeiling(s)
			return err
		})
	declareServiceFlags(fs, c)
	fs.Int64Var(&c.MaxPods, "max-pods", 110, "maximum number of pods on this node")
	fs.Int64Var(&c.PodPIDs, "pod-max-pids", 4096, "maximum number of processes and threads of a pod; -1 for no limit")
	fs.BoolVar(&c.SingleProcessOOMKill, "single-process-oom-kill", false,
		"when a container is out of memory, kill only the process that the kernel selects, and not all of its "+
			"processes (with cgroup v1 it is always one)")
	fs.BoolVar(&c.FailSwapOn, "fail-swap-on", false, "refuse to start if swap is enabled on this machine")
	declareFlag(fs, "kubelet-port", "port of the node's HTTPS server, which serves health, metrics, statistics and pods as kubelet does; 0 "+
		"disables it (default 10250)",
		func(s string) error {
			n, err := strconv.ParseUint(s, 10, 16)
			c.KubeletPort = int32(n)
			return err
		})
	c.KubeletPort = 10250
	declareFlag(fs, "capacity", "resources that this node reports instead of the machine's, such as cpu=2,memory=4Gi", func(s string) (err error) {
		c.Capacity, err = parseResources(s)
		return err
	})
	declareFlag(fs, "node-labels", "labels of the Node, KEY=VALUE,...", func(s string) (err error) {
		c.Labels, err = parseLabels(s)
		return err
	})
	declareFlag(fs, "taints", "taints of the Node, KEY[=VALUE]:EFFECT,...", func(s string) (err error) {
		c.Taints, err = parseTaints(s)
		return err
	})
	return c
}

// declareServiceFlags declares the flags for the rules of Services, cluster DNS, the local proxy of
// the API, and RuntimeClass handlers.
func declareServiceFlags(fs *flag.FlagSet, c *Config) {
	c.ProxyMode = proxy.ModeNFTables
	declareFlag(fs, "proxy-mode", "mode of the rules for Services: nftables, iptables, ipvs, or none if another product provides Services; "+
		"rules of other modes are removed (default nftables)", func(s string) (err error) {
		c.ProxyMode, err = proxy.ParseMode(s)
		return err
	})
	declareFlag(fs, "nodeport-addresses", "CIDRs,... of the node's addresses that accept connections to node ports (repeatable; default: all but "+
		"loopback)",
		func(s string) error { return c.addNodePortAddresses(s) })
	fs.StringVar(&c.ProxyHealthz, "proxy-healthz-address", fmt.Sprintf(":%d", proxyHealthzPort),
		"address, [ADDRESS]:PORT, of the health endpoints /healthz and /livez for load balancers in front of the "+
			"nodes; none disables them, as does --proxy-mode=none")
	fs.Var(stringList{&c.ClusterDNS}, "cluster-dns", "DNS server for pods (repeatable; default: the address of Service kube-system/kube-dns, if it exists)")
	fs.StringVar(&c.DNSLocal, "dns-local-address", dns.LinkLocal.String(),
		"address of this node at which the agent's DNS server also listens, in addition to the address of "+
			"Service kube-system/kube-dns; none disables it")
	fs.StringVar(&c.LocalAPI, "local-api-address", "127.0.0.1:6443",
		"loopback address, ADDRESS:PORT, at which the agent proxies connections to a ready API server; none "+
			"disables the proxy")
	fs.StringVar(&c.ResolvConf, "resolv-conf", "/etc/resolv.conf",
		"resolver configuration for pods; if it has only servers at loopback addresses, those of "+
			"systemd-resolved are used")
	declareFlag(fs, "runtime-handler",
		"additional handler name of RuntimeClasses for this node's runtime, which always has the names keelson "+
			"and runc (repeatable)", c.addHandler)
}

// declareReserveFlags declares the flags for reserved disk space, inodes and memory.
func (c *Config) declareReserveFlags(fs *flag.FlagSet) {
	declareFlag(fs, "disk-pressure-below", "free space on the disk of STATE-DIR below which the node has disk pressure, accepts no pods and evicts "+
		"pods, as a percentage or a size, such as 5% or 20Gi. Local volumes keep this much free, and images half "+
		"of it. Unused images are deleted if less than 1.5 times this much is free (default "+
		reservedspace.Default.String()+
		")", func(s string) (err error) {
		c.DiskFloor, err = reservedspace.Parse(s)
		return err
	})
	declareFlag(fs, "inode-pressure-below", "free inodes on the disk of STATE-DIR below which the node has disk pressure, as a percentage or a "+
		"number, such as 3% or 50000. Unused images are deleted if less than 1.5 times this many are free (default "+
		defaultInodeFloor.String()+
		")", func(s string) (err error) {
		c.InodeFloor, err = parseInodeFloor(s)
		return err
	})
	declareFlag(fs, "memory-pressure-below", "available memory below which the node has memory pressure, accepts no pods without memory requests, and "+
		"evicts pods until enough memory is available; as a size or a percentage, such as 500Mi or 5% (default "+
		defaultMemoryFloor.String()+
		")", func(s string) (err error) {
		c.MemoryFloor, err = parseMemoryFloor(s)
		return err
	})
	declareFlag(fs, "local-volumes-limit", "maximum total size of the local volumes, such as 100Gi (default: the size of the disk without the space "+
		"that --disk-pressure-below reserves)", func(s string) error {
		q, err := resource.ParseQuantity(s)
		if err != nil || q.Sign() <= 0 {
			return fmt.Errorf("%q is no size above zero", s)
		}
		c.LocalVolumesLimit = saturate.Value(&q)
		return nil
	})
}

// Check returns an error that names a missing or invalid flag, or nil. It does not inspect the
// machine and changes nothing.
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
			return fmt.Errorf("--local-api-address %q: want a loopback address and a port, such as 127.0.0.1:6443, or none", c.LocalAPI)
		}
	}
	if _, err := healthzAddress(c.ProxyHealthz); err != nil {
		return err
	}
	if c.FenceAfter != 0 && (c.FenceAfter < minFence || c.FenceAfter%time.Second != 0) {
		return fmt.Errorf("--fence-after %s: want whole seconds, at least %s, or 0 for never", c.FenceAfter, minFence)
	}
	return nil
}

// Complete calls Check, and sets the defaults of unset fields, some of which depend on the machine.
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
			return fmt.Errorf("--runtime-dir is not set, and the folder of this program could not be detected: %w", err)
		}
		c.RuntimeDir = filepath.Dir(self)
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
	return agent.Paths{State: c.StateDir, Run: c.RunDir, Logs: c.LogDir, LogLinks: c.LogLinksDir, CNIConf: c.CNIConfDir, CNIBin: c.CNIBinDir,
		Archives: c.ArchivesDir, Kubelet: c.KubeletDir}
}

// OCI returns the configuration of the container runtime: its folders and its parent cgroup.
func (c *Config) OCI() oci.Config {
	return oci.Config{StateDir: filepath.Join(c.StateDir, "oci"), RunDir: filepath.Join(c.RunDir, "oci"), CgroupRoot: c.CgroupRoot}
}

func (c *Config) setWireGuardPort(s string) error {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return fmt.Errorf("%q is not a port: want 1 to 65535", s)
	}
	c.wireguard.Port = int(n)
	return nil
}

func (c *Config) setKeepalive(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 || d > 65535*time.Second || d%time.Second != 0 {
		return fmt.Errorf("%q: want whole seconds, at most 65535, such as 25s, or 0", s)
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
			return nil, fmt.Errorf("%q is not a valid quantity of %s", value, name)
		}
		out[v1.ResourceName(name)] = q
	}
	return out, nil
}

// maxHandlers is the maximum number of runtime handlers in the node's status.
const maxHandlers = 32

// addHandler adds the value s of the flag --runtime-handler: NAME.
func (c *Config) addHandler(s string) error {
	name, err := oci.ParseHandler(s)
	if err != nil {
		return err
	}
	if msgs := validation.IsDNS1123Label(name); len(msgs) > 0 {
		return fmt.Errorf("%q is not a valid handler name: %s", name, msgs[0])
	}
	if len(c.RuntimeHandlers) >= maxHandlers {
		return fmt.Errorf("at most %d handler names are allowed", maxHandlers)
	}
	c.RuntimeHandlers = append(c.RuntimeHandlers, name)
	return nil
}

// addNodePortAddresses adds the value s of the flag --nodeport-addresses: CIDR,...
func (c *Config) addNodePortAddresses(s string) error {
	for part := range strings.SplitSeq(s, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(part))
		if err != nil {
			return fmt.Errorf("%q is not a CIDR: want for example 10.0.0.0/8 or 192.0.2.7/32", part)
		}
		p = p.Masked()
		if slices.ContainsFunc(c.NodePortAddresses, p.Overlaps) {
			return fmt.Errorf("%s overlaps another range of the flag", p)
		}
		c.NodePortAddresses = append(c.NodePortAddresses, p)
	}
	return nil
}

// addMirror adds the value s of the flag --registry-mirror: REGISTRY=HOST[:PORT].
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
