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

// WithNetwork gives the agent the real pod network, routes and Service rules. A
// fake node leaves it out. A machine that cannot do what it is to do is refused.
func (c *Config) WithNetwork() error {
	log := c.Log
	if c.podNetwork == network.ModeWireGuard {
		if err := c.encrypt(); err != nil {
			return err
		}
	}
	foreign := func() bool { path, err := cni.FindOperatorConfig(c.CNIConfDir); return err == nil && path != "" }
	c.foreignNetwork = foreign
	c.ownPods = func() bool { return network.AllPodsOnOwnNetwork(c.CNIConfDir, filepath.Join(c.RunDir, "cni")) }
	routes := &network.Routes{Node: c.NodeName, Mode: c.podNetwork, Encryption: c.wireguard, OwnKey: c.ownKey, ForeignNetwork: foreign, Log: log.With("part", "network")}
	c.unreached = routes.Unreached
	for _, s := range c.NodeIPs {
		if ip, err := netip.ParseAddr(s); err == nil {
			routes.NodeIPs = append(routes.NodeIPs, ip.Unmap())
		}
	}
	var ip netip.Addr
	if len(c.NodeIPs) > 0 {
		ip, _ = netip.ParseAddr(c.NodeIPs[0]) // the invalid one was refused by Complete
	}
	flows, health := proxy.NewStaleFlowCleaner(), proxy.NewHealthChecks(log.With("part", "proxy"))
	rules := &proxy.Proxy{Node: c.NodeName, NodeIP: ip, Mode: c.ProxyMode, NodePorts: c.NodePortAddresses, ForeignNetwork: foreign,
		Flows: flows, Health: health, Metrics: proxy.NewMetrics(), Log: log.With("part", "proxy")}
	var pods *network.Network // set before a part runs
	c.Network = func(o agent.Objects) agent.Network {
		routes.Objects = o
		rules.ControlPlane, _ = o.(agent.ControlPlane)
		pods = network.New(network.Config{
			ConfDir: c.CNIConfDir, BinDirs: []string{c.CNIBinDir}, RunDir: filepath.Join(c.RunDir, "cni"), SourceExempt: c.SourceExempt,
			PodCIDRs: func() []netip.Prefix { return o.Cluster().PodPrefixes() }, MTU: routes.MTU, Log: log.With("part", "network"),
		})
		return pods
	}

	c.serviceListens(rules)
	c.Proxy, c.proxyMetrics = rules, rules.WriteMetrics
	var answers *proxyhealth.Server
	at, err := healthzAddress(c.ProxyHealthz)
	if err != nil {
		return err
	}
	if at != "" && c.ProxyMode != proxy.ModeNone { // without rules of ours another proxy answers
		answers = proxyhealth.New(proxyhealth.Config{Address: at, Log: log.With("part", "proxy health")})
		rules.Synced = answers
		c.proxyMetrics = func(ctx context.Context, w io.Writer) error {
			return errors.Join(rules.WriteMetrics(ctx, w), answers.WriteMetrics(w))
		}
	}
	local, _ := netip.ParseAddr(c.DNSLocal) // none, where it is none
	c.dns = dns.New(dns.Config{Node: c.NodeName, StateDir: filepath.Join(c.StateDir, "dns"), RunDir: c.RunDir, ResolvConf: c.ResolvConf,
		Local: local, ForeignNetwork: foreign, Log: log.With("part", "dns")})
	c.Extra = map[string]func(context.Context, agent.Objects, agent.Reporter) error{
		"dns":            c.dns.Run,
		"udp flows":      func(ctx context.Context, _ agent.Objects, _ agent.Reporter) error { return flows.Run(ctx) },
		"service health": func(ctx context.Context, _ agent.Objects, _ agent.Reporter) error { return health.Run(ctx) },
		"announcements":  c.announcements(log),
		partSenders: func(ctx context.Context, _ agent.Objects, _ agent.Reporter) error {
			return pods.MaintainSenderCheck(ctx)
		},
		partRoutes: func(ctx context.Context, _ agent.Objects, _ agent.Reporter) error { return routes.Run(ctx) },
	}
	if answers != nil {
		c.Extra["proxy health"] = answers.Run
	}
	if at, err := netip.ParseAddrPort(c.LocalAPI); err == nil { // none is none, and what is wrong was refused by Complete
		c.Extra["local API"] = apiproxy.New(apiproxy.Config{Address: at, Log: log.With("part", "local API")}).Run
	}
	if c.ownKey != nil {
		c.Extra[partKey] = func(ctx context.Context, _ agent.Objects, _ agent.Reporter) error { return c.ownKey.Follow(ctx) }
	}
	return nil
}

// serviceListens tells the Service rules on which ports this agent listens where its settings are not the default ones.
func (c *Config) serviceListens(rules *proxy.Proxy) {
	if c.KubeletPort > 0 {
		rules.ListenPorts = append(rules.ListenPorts, agentport.Port{Proto: "tcp", Number: uint16(c.KubeletPort)})
	}
	if c.wireguard.Port > 0 {
		rules.ListenPorts = append(rules.ListenPorts, agentport.Port{Proto: "udp", Number: uint16(c.wireguard.Port)})
	}
}

// encrypt opens the node's own key, of which others are told the public half.
func (c *Config) encrypt() (err error) {
	if err := network.CheckWireGuard(); err != nil {
		return err
	}
	if c.ownKey, err = network.OpenOwnKey(c.StateDir, c.Log.With("part", "network")); err != nil {
		return fmt.Errorf("--pod-network=wireguard: %w", err)
	}
	return nil
}

// announcements answers for addresses of load balancers, for which the node says that it does. One without Service rules has nowhere
// to send what would come.
func (c *Config) announcements(log *slog.Logger) func(context.Context, agent.Objects, agent.Reporter) error {
	if c.announces = c.ProxyMode != proxy.ModeNone; !c.announces {
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

// addSourceExempt adds namespaces whose pods may send under addresses that are not their own.
func (c *Config) addSourceExempt(text string) error {
	for name := range strings.SplitSeq(text, ",") {
		name = strings.TrimSpace(name)
		if msgs := validation.IsDNS1123Label(name); name != "*" && len(msgs) > 0 {
			return fmt.Errorf("namespace %q: %s", name, msgs[0])
		}
		c.SourceExempt = append(c.SourceExempt, name)
	}
	return nil
}
