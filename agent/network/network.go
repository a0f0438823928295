// Package network attaches sandboxes to the pod network through CNI plugins and
// keeps the routes to other nodes' pods. It implements agent.Network.
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

// Config is what a network is made of.
type Config struct {
	ConfDir string // a configuration in here wins over our own
	BinDirs []string
	RunDir  string // addresses and cached results; emptied by a reboot
	// PodCIDRs returns this node's, one of each family that pods have; none while none is allocated.
	PodCIDRs func() []netip.Prefix
	// MTU returns that of pods' interfaces; 0 or nil: that of the plugin.
	MTU func() int
	// Deadline is how long one call of a verb may take, all plugins together; default 1 min.
	Deadline time.Duration
	// SourceExempt are the namespaces whose pods may send under addresses that are not their own; "*" is all of them.
	SourceExempt []string
	Log          *slog.Logger
}

// Network implements agent.Network.
type Network struct {
	cfg  Config
	exec *executor
	cni  *libcni.CNIConfig
	// senders checks under which addresses pods of our own network send.
	senders *senderCheck

	mu    sync.Mutex
	cache map[string]*libcni.NetworkConfigList // by what it was made from
	last  statuses
	// attached are the sandboxes that this process has attached or is attaching: a list of sandboxes may be older.
	attached map[string]bool

	// adding is held by every ADD for reading: the GC verb of plugins, which goes by a list of what there is, does not
	// run beside them.
	adding sync.RWMutex
}

const ifName = "eth0"

// namespaceArg is the CNI argument that holds the namespace of the pod.
const namespaceArg = "K8S_POD_NAMESPACE"

// New returns a network. It reads its configuration on each call, so that an
// operator may swap it while the agent runs.
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

// limited gives a verb its deadline.
func (n *Network) limited(ctx context.Context, verb string) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, n.cfg.Deadline, fmt.Errorf("CNI %s took longer than %s", verb, n.cfg.Deadline))
}

// Ready is nil when there is a configuration whose plugins are there and, where they know the verb, say that they are ready.
func (n *Network) Ready() error {
	list, err := n.list(false)
	if err != nil {
		return err
	}
	for _, p := range list.Plugins {
		if _, err := n.exec.FindInPath(p.Network.Type, n.cfg.BinDirs); err != nil {
			return fmt.Errorf("network %q: plugin %s is not in %s: install it there", list.Name, p.Network.Type, strings.Join(n.cfg.BinDirs, ", "))
		}
	}
	if list.Name == cni.Name {
		return nil // ours need nothing but their files
	}
	return n.last.of(string(list.Bytes), func() error {
		ctx, cancel := context.WithTimeoutCause(context.Background(), statusLimit, fmt.Errorf("CNI STATUS took longer than %s", statusLimit))
		defer cancel()
		if err := n.cni.GetStatusNetworkList(ctx, list); err != nil {
			return fmt.Errorf("network %q is not ready: CNI STATUS: %w", list.Name, err)
		}
		return nil
	})
}

// The bounds of the STATUS verb: it is asked by whoever wants to know of the node, and a plugin is a process.
const (
	statusLimit = 10 * time.Second
	statusEvery = 5 * time.Second
)

// statuses keeps what plugins said of themselves last.
type statuses struct {
	mu   sync.Mutex
	list string // the configuration of which they are
	at   time.Time
	said error
}

// of asks, or says what was said a moment ago.
func (s *statuses) of(list string, ask func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.list != list || time.Since(s.at) > statusEvery {
		s.said = ask()
		s.list, s.at = list, time.Now()
	}
	return s.said
}

// list is the configuration in force: a foreign one, else our own.
func (n *Network) list(ports bool) (*libcni.NetworkConfigList, error) {
	path, err := cni.FindOperatorConfig(n.cfg.ConfDir)
	if err != nil {
		return nil, err
	}
	if path != "" {
		return load(path)
	}
	cidrs := n.cfg.PodCIDRs()
	if len(cidrs) == 0 {
		return nil, errors.New("network is not ready: the node has no pod CIDR yet and there is no configuration in " + n.cfg.ConfDir)
	}
	mtu := 0
	if n.cfg.MTU != nil {
		mtu = n.cfg.MTU()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	key := fmt.Sprint(cidrs, mtu, ports)
	if l := n.cache[key]; l != nil {
		return l, nil
	}
	raw, err := cni.Conflist(cni.Options{PodCIDRs: cidrs, MTU: mtu, IPAMDir: n.ipamDir(), HostPorts: ports})
	if err != nil {
		return nil, err
	}
	l, err := libcni.NetworkConfFromBytes(raw)
	if err != nil {
		return nil, fmt.Errorf("own network configuration: %w", err)
	}
	if len(n.cache) > 8 {
		clear(n.cache) // of what was before
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

// protocolName is CNI's word for the CRI's protocol number.
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

// Add attaches the sandbox, whose loopback is up. Adding an attached one returns what it has.
func (n *Network) Add(ctx context.Context, r agent.NetworkRequest) (agent.NetworkStatus, error) {
	list, err := n.list(len(portMappings(r)) > 0)
	if err != nil {
		return agent.NetworkStatus{}, err
	}
	if err := canShape(list, r); err != nil {
		return agent.NetworkStatus{}, err
	}
	rt := runtimeConf(r)
	n.adding.RLock()
	defer n.adding.RUnlock()
	n.note(r.SandboxID, true)
	adding, cancel := n.limited(ctx, "ADD")
	defer cancel()
	if cached, err := n.cni.GetNetworkListCachedResult(list, rt); err == nil && cached != nil {
		if unchecked(list) || n.cni.CheckNetworkList(adding, list, rt) == nil {
			if list.Name == cni.Name {
				if err := n.checkSender(adding, r.SandboxID, r.Namespace, cached); err != nil {
					return agent.NetworkStatus{}, fmt.Errorf("network %q: pod %s/%s: %w", list.Name, r.Namespace, r.Name, err)
				}
			}
			return status(cached)
		}
	}
	if list.Name == cni.Name && slices.ContainsFunc(n.cfg.PodCIDRs(), func(p netip.Prefix) bool { return p.Addr().Is6() }) {
		if err := prepareBridge(); err != nil {
			return agent.NetworkStatus{}, err
		}
	}
	res, err := n.cni.AddNetworkList(adding, list, rt)
	if err == nil && list.Name == cni.Name {
		err = errors.Join(n.checkSender(adding, r.SandboxID, r.Namespace, res), n.shape(res, r))
	}
	if err != nil {
		// A failed ADD may have got half-way; the specification asks for a DEL.
		undoing, cancel := n.limited(context.WithoutCancel(ctx), "DEL")
		defer cancel()
		if derr := n.undo(undoing, list, rt); derr != nil {
			n.cfg.Log.Warn("releasing a failed attachment", "sandbox", r.SandboxID, "err", derr)
		}
		n.note(r.SandboxID, false)
		n.senders.forget(r.SandboxID)
		return agent.NetworkStatus{}, fmt.Errorf("network %q: CNI ADD for pod %s/%s: %w", list.Name, r.Namespace, r.Name, err)
	}
	return status(res)
}

func status(res types.Result) (agent.NetworkStatus, error) {
	r, err := current.NewResultFromResult(res)
	if err != nil {
		return agent.NetworkStatus{}, fmt.Errorf("CNI result: %w", err)
	}
	var s agent.NetworkStatus
	for _, ip := range r.IPs {
		if ip.Interface != nil && *ip.Interface >= 0 && *ip.Interface < len(r.Interfaces) && r.Interfaces[*ip.Interface].Sandbox == "" {
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

// undo takes back what an ADD that never succeeded may have made. Each plugin is asked, whatever the others say; one
// that is not installed cannot have made anything.
func (n *Network) undo(ctx context.Context, list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) error {
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

// Describe is the configuration in force as JSON, for people.
func (n *Network) Describe() string {
	l, err := n.list(true)
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
