// Package network attaches sandboxes to the pod network with CNI plugins, and maintains the routes
// to the pods of other nodes. It implements agent.Network.
package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/cni"
)

// Config is the configuration of a Network.
type Config struct {
	ConfDir string // directory for a third-party configuration, which takes precedence over Keelson's own
	BinDirs []string
	RunDir  string // addresses and cached results; deleted by a reboot
	// PodCIDRs returns this node's pod ranges, one per address family. It returns none until they
	// are allocated.
	PodCIDRs func() []netip.Prefix
	// MTU returns the MTU of pod interfaces. 0, or a nil function, selects the plugin's default.
	MTU func() int
	// Deadline limits one CNI operation, all plugins together; default 1 minute.
	Deadline time.Duration
	// SourceExempt are the namespaces in which pods may send from addresses that are not their own.
	// "*" means all namespaces.
	SourceExempt []string
	Log          *slog.Logger
}

// Network attaches pod sandboxes to the pod network with CNI plugins. It implements agent.Network.
// Keelson's own configuration is used unless ConfDir contains a third-party configuration.
type Network struct {
	cfg  Config
	exec *executor
	cni  *libcni.CNIConfig
	// senders makes the kernel drop packets of pods on Keelson's own network with other source
	// addresses.
	senders *senderCheck

	mu          sync.Mutex
	cache       map[string]*libcni.NetworkConfigList // key: the inputs from which the configuration was generated
	statusCache pluginStatus
	// attached contains the sandboxes that this process has attached or is attaching. GC keeps them
	// even if its list of existing sandboxes is older and lacks them.
	attached map[string]bool

	// adding is held for reading during every ADD. The GC verb makes a plugin remove the
	// attachments of all sandboxes that are not on its list. GC must therefore not run during an
	// ADD.
	adding sync.RWMutex
}

const ifName = "eth0"

// namespaceArg is the name of the CNI argument that contains the pod's namespace.
const namespaceArg = "K8S_POD_NAMESPACE"

// New returns a Network. Each call of its methods reads the CNI configuration again, so that an
// operator may replace it while the agent runs.
func New(c Config) *Network {
	exec := &executor{}
	if c.Deadline == 0 {
		c.Deadline = time.Minute
	}
	n := &Network{
		cfg: c, exec: exec,
		cni:   libcni.NewCNIConfigWithCacheDir(c.BinDirs, filepath.Join(c.RunDir, "cache"), exec),
		cache: map[string]*libcni.NetworkConfigList{}, attached: map[string]bool{},
	}
	n.senders = newSenderCheck(n.recordedPorts, c.Log)
	return n
}

// withDeadline returns a context that ends after Config.Deadline, with an error that names the CNI
// verb.
func (n *Network) withDeadline(ctx context.Context, verb string) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, n.cfg.Deadline, fmt.Errorf("CNI %s took longer than %s", verb, n.cfg.Deadline))
}

// Ready returns nil if a CNI configuration exists, its plugins are installed, and the plugins that
// support the STATUS verb report that they are ready.
func (n *Network) Ready() error {
	list, err := n.activeConfiguration(false)
	if err != nil {
		return err
	}
	for _, p := range list.Plugins {
		if _, err := n.exec.FindInPath(p.Network.Type, n.cfg.BinDirs); err != nil {
			return fmt.Errorf("network %q: plugin %s is not in %s: install it there", list.Name, p.Network.Type,
				strings.Join(n.cfg.BinDirs, ", "))
		}
	}
	if list.Name == cni.Name {
		return nil // Keelson's own plugins require nothing but their files
	}
	return n.statusCache.cachedOrQuery(string(list.Bytes), func() error {
		ctx, cancel := context.WithTimeoutCause(context.Background(), statusLimit,
			fmt.Errorf("CNI STATUS took longer than %s", statusLimit))
		defer cancel()
		if err := n.cni.GetStatusNetworkList(ctx, list); err != nil {
			return fmt.Errorf("network %q is not ready: CNI STATUS: %w", list.Name, err)
		}
		return nil
	})
}

// Timeout of the CNI verb STATUS, and how long its result is cached. Each STATUS call starts a
// process, and every client that inspects the node calls Ready.
const (
	statusLimit = 10 * time.Second
	statusEvery = 5 * time.Second
)

// pluginStatus caches the result of the plugins' STATUS verb.
type pluginStatus struct {
	mu   sync.Mutex
	list string // the configuration that was queried
	at   time.Time
	err  error
}

// cachedOrQuery returns the result of queryStatus, which calls the CNI verb STATUS. configuration
// identifies the CNI configuration. A previous result for the same configuration is returned again
// while it is at most statusEvery old.
func (s *pluginStatus) cachedOrQuery(configuration string, queryStatus func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.list != configuration || time.Since(s.at) > statusEvery {
		s.err = queryStatus()
		s.list, s.at = configuration, time.Now()
	}
	return s.err
}

// activeConfiguration returns the third-party CNI configuration if ConfDir contains one, and
// otherwise Keelson's own. If hostPorts is true, Keelson's own configuration includes the portmap
// plugin.
func (n *Network) activeConfiguration(hostPorts bool) (*libcni.NetworkConfigList, error) {
	path, err := cni.FindOperatorConfig(n.cfg.ConfDir)
	if err != nil {
		return nil, err
	}
	if path != "" {
		return loadConfiguration(path)
	}
	cidrs := n.cfg.PodCIDRs()
	if len(cidrs) == 0 {
		return nil, errors.New("network is not ready: the node has no pod CIDR yet and there is no configuration in " +
			n.cfg.ConfDir)
	}
	mtu := 0
	if n.cfg.MTU != nil {
		mtu = n.cfg.MTU()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	key := fmt.Sprint(cidrs, mtu, hostPorts)
	if l := n.cache[key]; l != nil {
		return l, nil
	}
	raw, err := cni.Conflist(cni.Options{PodCIDRs: cidrs, MTU: mtu, IPAMDir: n.ipamDir(), HostPorts: hostPorts})
	if err != nil {
		return nil, err
	}
	l, err := libcni.NetworkConfFromBytes(raw)
	if err != nil {
		return nil, fmt.Errorf("own network configuration: %w", err)
	}
	if len(n.cache) > 8 {
		clear(n.cache) // drop configurations for previous settings
	}
	n.cache[key] = l
	return l, nil
}

func runtimeConf(r agent.NetworkRequest) *libcni.RuntimeConf {
	caps := map[string]any{}
	if p := portMappings(r); len(p) > 0 {
		caps["portMappings"] = p
	}
	if r.Ingress > 0 || r.Egress > 0 {
		caps["bandwidth"] = map[string]int64{
			"ingressRate": r.Ingress, "ingressBurst": r.Ingress, "egressRate": r.Egress, "egressBurst": r.Egress,
		}
	}
	return &libcni.RuntimeConf{
		ContainerID: r.SandboxID, NetNS: r.NetNS, IfName: ifName,
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{namespaceArg, r.Namespace},
			{"K8S_POD_NAME", r.Name},
			{"K8S_POD_INFRA_CONTAINER_ID", r.SandboxID},
			{"K8S_POD_UID", string(r.UID)},
		},
		CapabilityArgs: caps,
	}
}

type portMapping struct {
	HostPort      int32  `json:"hostPort"`
	ContainerPort int32  `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP,omitempty"`
}

func portMappings(r agent.NetworkRequest) []portMapping {
	var out []portMapping
	for _, p := range r.Ports {
		if p.HostPort > 0 {
			out = append(out, portMapping{p.HostPort, p.ContainerPort, protocolName(int32(p.Protocol)), p.HostIp})
		}
	}
	return out
}

// protocolName returns the CNI name of a CRI protocol number.
func protocolName(p int32) string {
	switch p {
	case 1:
		return "udp"
	case 2:
		return "sctp"
	default:
		return "tcp"
	}
}

// Add attaches a pod's sandbox to the pod network with the CNI verb ADD and returns its addresses.
// If the sandbox is already attached, Add returns its current status. The sandbox's loopback
// interface must be up. After a failed ADD, Add calls DEL.
func (n *Network) Add(ctx context.Context, r agent.NetworkRequest) (agent.NetworkStatus, error) {
	list, err := n.activeConfiguration(len(portMappings(r)) > 0)
	if err != nil {
		return agent.NetworkStatus{}, err
	}
	if err := checkBandwidthSupport(list, r); err != nil {
		return agent.NetworkStatus{}, err
	}
	rt := runtimeConf(r)
	n.adding.RLock()
	defer n.adding.RUnlock()
	n.recordAttached(r.SandboxID, true)
	adding, cancel := n.withDeadline(ctx, "ADD")
	defer cancel()
	if cached, err := n.cni.GetNetworkListCachedResult(list, rt); err == nil && cached != nil {
		if lacksCheckVerb(list) || n.cni.CheckNetworkList(adding, list, rt) == nil {
			if list.Name == cni.Name {
				if err := n.checkSender(adding, r.SandboxID, r.Namespace, cached); err != nil {
					return agent.NetworkStatus{}, fmt.Errorf("network %q: pod %s/%s: %w", list.Name,
						r.Namespace, r.Name, err)
				}
			}
			return parseStatus(cached)
		}
	}
	if list.Name == cni.Name && slices.ContainsFunc(n.cfg.PodCIDRs(), func(p netip.Prefix) bool {
		return p.Addr().Is6()
	}) {
		if err := prepareBridge(); err != nil {
			return agent.NetworkStatus{}, err
		}
	}
	res, err := n.cni.AddNetworkList(adding, list, rt)
	if err == nil && list.Name == cni.Name {
		err = errors.Join(n.checkSender(adding, r.SandboxID, r.Namespace, res), n.limitBandwidth(res, r))
	}
	if err != nil {
		// A failed ADD may have been partly executed; the CNI specification requires a DEL.
		undoing, cancel := n.withDeadline(context.WithoutCancel(ctx), "DEL")
		defer cancel()
		if derr := n.undoAdd(undoing, list, rt); derr != nil {
			n.cfg.Log.Warn("releasing a failed attachment", "sandbox", r.SandboxID, "err", derr)
		}
		n.recordAttached(r.SandboxID, false)
		n.senders.removeSandbox(r.SandboxID)
		return agent.NetworkStatus{}, fmt.Errorf("network %q: CNI ADD for pod %s/%s: %w", list.Name,
			r.Namespace, r.Name, err)
	}
	return parseStatus(res)
}

func parseStatus(res types.Result) (agent.NetworkStatus, error) {
	r, err := current.NewResultFromResult(res)
	if err != nil {
		return agent.NetworkStatus{}, fmt.Errorf("CNI result: %w", err)
	}
	var s agent.NetworkStatus
	for _, ip := range r.IPs {
		if ip.Interface != nil && *ip.Interface >= 0 && *ip.Interface < len(r.Interfaces) &&
			r.Interfaces[*ip.Interface].Sandbox == "" {
			continue
		}
		s.IPs = append(s.IPs, ip.Address.IP.String())
		if ip.Gateway != nil {
			s.Gateways = append(s.Gateways, ip.Gateway.String())
		}
	}
	for _, i := range r.Interfaces {
		if i.Sandbox != "" && i.Name == ifName {
			s.MAC = i.Mac
		}
	}
	if len(s.IPs) == 0 {
		return s, errors.New("CNI result has no address for the sandbox")
	}
	return s, nil
}

// undoAdd removes the interfaces and addresses that a failed ADD has created. It calls the DEL verb
// of every plugin of list, even if another plugin fails. It skips plugins that are not installed,
// because they cannot have created anything.
func (n *Network) undoAdd(ctx context.Context, list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) error {
	var errs []error
	for _, p := range slices.Backward(list.Plugins) {
		if _, err := n.exec.FindInPath(p.Network.Type, n.cfg.BinDirs); err != nil {
			continue
		}
		one := *list
		one.Plugins = []*libcni.PluginConfig{p}
		errs = append(errs, n.cni.DelNetworkList(ctx, &one, rt))
	}
	return errors.Join(errs...)
}

func (n *Network) ipamDir() string { return filepath.Join(n.cfg.RunDir, "ipam") }

// Describe returns the active configuration as indented JSON, for display.
func (n *Network) Describe() string {
	l, err := n.activeConfiguration(true)
	if err != nil {
		return err.Error()
	}
	var out any
	if json.Unmarshal(l.Bytes, &out) != nil {
		return string(l.Bytes)
	}
	raw, _ := json.MarshalIndent(out, "", "  ")
	return string(raw)
}
