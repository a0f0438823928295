package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/apiproxy"
	"keelson.dev/keelson/agent/dns"
	"keelson.dev/keelson/agent/l2announce"
	"keelson.dev/keelson/agent/network"
	"keelson.dev/keelson/agent/proxy"
	"keelson.dev/keelson/agent/proxyhealth"
	"keelson.dev/keelson/cni"
	"keelson.dev/keelson/internal/agentport"
)

// WithNetwork adds the built-in pod network, routes, Service rules and DNS server to the
// configuration. A fake node does not call it. It returns an error if the machine lacks a
// requirement.
func (c *Config) WithNetwork() error {
	log := c.Log
	if c.PodNetwork.mode == network.ModeWireGuard {
		if err := c.openWireGuardKey(); err != nil {
			return err
		}
	}
	foreign := func() bool { path, err := cni.FindOperatorConfig(c.Dirs.CNIConf); return err == nil && path != "" }
	c.PodNetwork.isForeign = foreign
	c.PodNetwork.hasOwnAddresses = func() bool {
		return network.AllPodsOnOwnNetwork(c.Dirs.CNIConf, filepath.Join(c.Dirs.Run, "cni"))
	}
	routes := &network.Routes{Node: c.NodeName, Mode: c.PodNetwork.mode, Encryption: c.PodNetwork.wireguard,
		OwnKey:         c.PodNetwork.ownKey,
		ForeignNetwork: foreign, Log: log.With("part", "network")}
	c.PodNetwork.unreachableNodes = routes.Unreached
	for _, s := range c.NodeIPs {
		if ip, err := netip.ParseAddr(s); err == nil {
			routes.NodeIPs = append(routes.NodeIPs, ip.Unmap())
		}
	}
	var ip netip.Addr
	if len(c.NodeIPs) > 0 {
		ip, _ = netip.ParseAddr(c.NodeIPs[0]) // Complete has refused an invalid address
	}
	flows, health := proxy.NewStaleFlowCleaner(), proxy.NewHealthChecks(log.With("part", "proxy"))
	rules := &proxy.Proxy{Node: c.NodeName, NodeIP: ip, Mode: c.Services.Mode, NodePorts: c.Services.NodePortAddresses,
		ForeignNetwork: foreign,
		Flows:          flows, Health: health, Metrics: proxy.NewMetrics(), Log: log.With("part", "proxy")}
	var pods *network.Network // set before any part runs
	c.PodNetwork.New = func(o agent.Objects) agent.Network {
		routes.Objects = o
		rules.ControlPlane, _ = o.(agent.ControlPlane)
		pods = network.New(network.Config{
			ConfDir: c.Dirs.CNIConf, BinDirs: []string{c.Dirs.CNIBin}, RunDir: filepath.Join(c.Dirs.Run, "cni"),
			SourceExempt: c.PodNetwork.SourceExempt,
			PodCIDRs: func() []netip.Prefix {
				return o.Cluster().PodPrefixes()
			}, MTU: routes.MTU, Log: log.With("part", "network"),
		})
		return pods
	}

	c.setServicePorts(rules)
	c.Services.Proxy, c.Services.metrics = rules, rules.WriteMetrics
	var answers *proxyhealth.Server
	at, err := healthzAddress(c.Services.Healthz)
	if err != nil {
		return err
	}
	if at != "" && c.Services.Mode != proxy.ModeNone {
		// with mode none another product runs the Service proxy and its health check
		answers = proxyhealth.New(proxyhealth.Config{Address: at, Log: log.With("part", "proxy health")})
		rules.Synced = answers
		c.Services.metrics = func(ctx context.Context, w io.Writer) error {
			return errors.Join(rules.WriteMetrics(ctx, w), answers.WriteMetrics(w))
		}
	}
	local, _ := netip.ParseAddr(c.Listen.DNS) // "none" becomes the zero address
	c.PodNetwork.dns = dns.New(dns.Config{Node: c.NodeName, StateDir: filepath.Join(c.Dirs.State, "dns"),
		RunDir:     c.Dirs.Run,
		ResolvConf: c.Pods.ResolvConf,
		Local:      local, ForeignNetwork: foreign, Log: log.With("part", "dns")})
	c.Parts.Extra = map[string]func(context.Context, agent.Objects, agent.Reporter) error{
		"dns":            c.PodNetwork.dns.Run,
		"udp flows":      func(ctx context.Context, _ agent.Objects, _ agent.Reporter) error { return flows.Run(ctx) },
		"service health": func(ctx context.Context, _ agent.Objects, _ agent.Reporter) error { return health.Run(ctx) },
		"announcements":  c.runAnnouncements(log),
		partSenders: func(ctx context.Context, _ agent.Objects, _ agent.Reporter) error {
			return pods.MaintainSenderCheck(ctx)
		},
		partRoutes: func(ctx context.Context, _ agent.Objects, _ agent.Reporter) error { return routes.Run(ctx) },
	}
	if answers != nil {
		c.Parts.Extra["proxy health"] = answers.Run
	}
	if at, err := netip.ParseAddrPort(c.Listen.API); err == nil {
		// "none" is disabled; Complete has refused an invalid address
		c.Parts.Extra["local API"] = apiproxy.New(apiproxy.Config{Address: at, Log: log.With("part", "local API")}).Run
	}
	if c.PodNetwork.ownKey != nil {
		c.Parts.Extra[partKey] = func(ctx context.Context, _ agent.Objects, _ agent.Reporter) error {
			return c.PodNetwork.ownKey.Follow(ctx)
		}
	}
	return nil
}

// setServicePorts sets the ports on which this agent listens, so that the Service rules do not
// capture traffic to them.
func (c *Config) setServicePorts(rules *proxy.Proxy) {
	if c.Listen.KubeletPort > 0 {
		rules.ListenPorts = append(rules.ListenPorts,
			agentport.Port{Proto: "tcp", Number: uint16(c.Listen.KubeletPort)})
	}
	if c.PodNetwork.wireguard.Port > 0 {
		rules.ListenPorts = append(rules.ListenPorts,
			agentport.Port{Proto: "udp", Number: uint16(c.PodNetwork.wireguard.Port)})
	}
}

// openWireGuardKey loads or creates the node's WireGuard key. The agent reports the public key for
// the other nodes.
func (c *Config) openWireGuardKey() (err error) {
	if err := network.CheckWireGuard(); err != nil {
		return err
	}
	if c.PodNetwork.ownKey, err = network.OpenOwnKey(c.Dirs.State, c.Log.With("part", "network")); err != nil {
		return fmt.Errorf("--pod-network=wireguard: %w", err)
	}
	return nil
}

// runAnnouncements returns the agent part that announces load balancer addresses on the local
// network. With proxy mode none, the returned part does nothing: a node without Service rules
// cannot forward the traffic to these addresses.
func (c *Config) runAnnouncements(log *slog.Logger) func(context.Context, agent.Objects, agent.Reporter) error {
	if c.Services.announcesL2 = c.Services.Mode != proxy.ModeNone; !c.Services.announcesL2 {
		return func(ctx context.Context, _ agent.Objects, _ agent.Reporter) error {
			<-ctx.Done()
			return ctx.Err()
		}
	}
	n := &l2announce.Announcer{Node: c.NodeName, Log: log.With("part", "announcements")}
	for _, s := range c.NodeIPs {
		if ip, err := netip.ParseAddr(s); err == nil {
			n.NodeIPs = append(n.NodeIPs, ip.Unmap())
		}
	}
	return n.Run
}

// addSourceExempt adds the namespaces in text, separated by commas. Pods in these namespaces may
// send from any source address.
func (c *Config) addSourceExempt(text string) error {
	for name := range strings.SplitSeq(text, ",") {
		name = strings.TrimSpace(name)
		if msgs := validation.IsDNS1123Label(name); name != "*" && len(msgs) > 0 {
			return fmt.Errorf("namespace %q: %s", name, msgs[0])
		}
		c.PodNetwork.SourceExempt = append(c.PodNetwork.SourceExempt, name)
	}
	return nil
}
