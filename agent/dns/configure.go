package dns

import (
	"crypto/tls"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/dns/corefile"
	"keelson.dev/keelson/agent/dns/forward"
	"keelson.dev/keelson/agent/dns/zone"
	"keelson.dev/keelson/internal/safepath"
)

// Names of the ConfigMap that contains the Corefile, as in every installation of CoreDNS.
const (
	configMap   = "coredns"
	corefileKey = "Corefile"
	etcCoreDNS  = "/etc/coredns" // where CoreDNS pods mount the ConfigMap's keys as files
)

// chainSource contains the inputs from which the active serverChain was built. When they change,
// the chain is rebuilt.
type chainSource struct {
	text        string            // text of the Corefile
	files       map[string]string // contents of the files that the Corefile refers to, by path
	servers     string            // addresses at which DNS is served
	lastMessage string            // the message that was reported last about the Corefile
}

// maxFileBytes is the maximum size of a file that a Corefile refers to.
const maxFileBytes = 1 << 20

// configure builds and activates a new serverChain if the Corefile or a file that it refers to has
// changed. If the Corefile is invalid, the last valid Corefile remains active.
func (s *Server) configure(objects agent.Objects, reports agent.Reporter) {
	var keys map[string]string
	var about *v1.ConfigMap
	text := corefile.DefaultFor(clusterDomain(objects))
	if cm, ok := objects.ConfigMap(agent.DNSNamespace, configMap); ok {
		keys, about = cm.Data, cm
		if t := cm.Data[corefileKey]; t != "" {
			text = t
		}
	}
	cfg, err := corefile.ParseConfig(text)
	if err != nil {
		s.reportRefused(about, reports, err)
		if s.chain.Load() != nil && s.source.text != "" {
			text = s.source.text
		} else if text, err = s.readLastCorefile(); err != nil {
			text = corefile.DefaultFor(clusterDomain(objects))
		}
		if cfg, err = corefile.ParseConfig(text); err != nil { // the last Corefile was valid for another release
			text = corefile.DefaultFor(clusterDomain(objects))
			if cfg, err = corefile.ParseConfig(text); err != nil {
				s.cfg.Log.Error("the default Corefile is invalid", "err", err)
				return
			}
		}
	} else {
		s.reportWarnings(about, reports, cfg.Warnings)
		s.saveCorefile(about, text)
	}
	files := s.readFiles(cfg, keys)
	servers := fmt.Sprint(s.wantedAddresses(objects))
	if s.chain.Load() != nil && text == s.source.text && maps.Equal(files, s.source.files) &&
		servers == s.source.servers {
		return
	}
	next := s.buildChain(cfg, files, s.wantedAddresses(objects))
	old := s.chain.Swap(next)
	s.source.text, s.source.files, s.source.servers = text, files, servers
	if old != nil {
		old.shutDown()
		s.cfg.Log.Info("the DNS configuration has changed", "server blocks", len(next.blocks))
	}
}

func clusterDomain(objects agent.Objects) string {
	if d := objects.Cluster().Domain; d != "" {
		return d
	}
	return "cluster.local"
}

// readLastCorefile returns the last valid Corefile, which an earlier agent process stored in
// StateDir.
func (s *Server) readLastCorefile() (string, error) {
	raw, err := os.ReadFile(filepath.Join(s.cfg.StateDir, "Corefile"))
	return string(raw), err
}

func (s *Server) saveCorefile(about *v1.ConfigMap, text string) {
	if about == nil || text == s.source.text {
		return
	}
	file := filepath.Join(s.cfg.StateDir, "Corefile")
	err := os.MkdirAll(s.cfg.StateDir, 0o755)
	if err == nil {
		err = os.WriteFile(file, []byte(text), 0o644)
	}
	if err != nil {
		s.cfg.Log.Warn("the Corefile could not be saved for the next start", "err", err)
	}
}

// readFiles returns the contents of the files that a Corefile refers to, by path. Files in
// /etc/coredns are read from keys, the keys of the CoreDNS ConfigMap, as they are mounted in
// CoreDNS pods. Other files are read from the node. Unreadable files are empty.
func (s *Server) readFiles(cfg *corefile.Config, keys map[string]string) map[string]string {
	out := map[string]string{}
	read := func(name string) {
		if _, ok := out[name]; ok || name == "" {
			return
		}
		if dir, key := path.Split(path.Clean(name)); path.Clean(dir) == etcCoreDNS {
			out[name] = keys[key]
			return
		}
		from := name
		if from == "/etc/resolv.conf" && s.cfg.ResolvConf != "" {
			from = s.cfg.ResolvConf
		}
		out[name] = ""
		f, err := safepath.OpenRegular(from)
		if err != nil {
			return
		}
		defer f.Close()
		if raw, err := io.ReadAll(io.LimitReader(f, maxFileBytes)); err == nil {
			out[name] = string(raw)
		}
	}
	for _, b := range cfg.Servers {
		if b.Hosts != nil {
			read(b.Hosts.File)
		}
		for _, f := range b.Forwards {
			for _, to := range f.To {
				if strings.HasPrefix(to, "/") {
					read(to)
				}
			}
		}
	}
	return out
}

// buildChain builds a serverChain from a parsed Corefile. files contains the files to which the
// Corefile refers, by path. ownIPs are the addresses of this DNS server.
func (s *Server) buildChain(cfg *corefile.Config, files map[string]string, self []netip.Addr) *serverChain {
	c := &serverChain{index: s.index, byZone: map[string]*serverBlock{}, health: cfg.Health, ready: cfg.Ready,
		prometheus: cfg.Prometheus}
	for _, b := range cfg.Servers {
		next := &serverBlock{cfg: b, counts: s.zoneCountsOf(b.Zones[0], b.Errors)}
		if k := b.Kubernetes; k != nil {
			next.options = zone.Options{TTL: k.TTL, Pods: k.Pods, PodNames: k.PodNames, IgnoreEmpty: k.IgnoreEmpty,
				Namespaces: k.Namespaces, Servers: self}
		}
		if h := b.Hosts; h != nil {
			next.hosts = parseHosts(append([]string{files[h.File]}, h.Inline...)...)
		}
		if k := b.Cache; k != nil {
			next.cache = forward.NewCache(forward.CacheConfig{Capacity: k.Capacity, Denied: k.CapacityDenied,
				MinTTL: k.MinTTL, MaxTTL: k.MaxTTL,
				MinDenialTTL: k.MinDenialTTL, MaxDenialTTL: k.MaxDenialTTL, ServFail: k.ServFail, Stale: k.Stale})
		}
		for _, f := range b.Forwards {
			next.forwards = append(next.forwards,
				&forwardRule{from: f.From, except: f.Except, forwarder: forward.New(forward.Config{
					Targets: s.forwardTargets(f, files, self), Policy: f.Policy, MaxFails: f.MaxFails,
					MaxConcurrent: int64(f.MaxConcurrent),
					HealthEvery:   f.HealthEvery, TCP: f.ForceTCP, Log: s.cfg.Log})})
		}
		c.blocks = append(c.blocks, next)
		for _, z := range b.Zones {
			c.byZone[z] = next
		}
	}
	return c
}

// shutDown stops the health probes of the chain's upstream servers, and waits until background
// refreshes of its caches have ended.
func (c *serverChain) shutDown() {
	for _, b := range c.blocks {
		for _, f := range b.forwards {
			f.forwarder.Close()
		}
		b.refreshes.Wait()
	}
}

// forwardTargets returns the upstream servers of a forward rule. It omits ownIPs, the addresses of
// this DNS server. Otherwise a query that the server cannot answer would be sent to itself.
func (s *Server) forwardTargets(f corefile.Forward, files map[string]string, self []netip.Addr) (out []forward.Target) {
	add := func(text string) {
		u, err := corefile.ParseUpstream(text)
		if err != nil || u.Path != "" {
			return
		}
		if u.Address.Port() == s.cfg.Port && slices.Contains(self, u.Address.Addr()) {
			s.cfg.Log.Warn("a forward to this server itself is omitted", "server", text, "zone", f.From)
			return
		}
		t := forward.Target{Address: u.Address}
		if u.TLS {
			name := u.Server
			if name == "" {
				name = f.TLSServer
			}
			if name == "" {
				name = u.Address.Addr().String()
			}
			t.TLS = &tls.Config{ServerName: name, MinVersion: tls.VersionTLS12}
		}
		out = append(out, t)
	}
	for _, to := range f.To {
		if !strings.HasPrefix(to, "/") {
			add(to)
			continue
		}
		for line := range strings.Lines(files[to]) {
			if w := strings.Fields(line); len(w) > 1 && w[0] == "nameserver" && len(out) < 15 {
				ip, _, _ := strings.Cut(w[1], "%")
				add(ip)
			}
		}
	}
	return out
}

// reportRefused reports an invalid Corefile in an Event about its ConfigMap, unless the same error
// was reported last.
func (s *Server) reportRefused(about *v1.ConfigMap, reports agent.Reporter, err error) {
	s.reportEvent(about, reports, "CorefileRefused",
		fmt.Sprintf("%v: nodes go on with the last Corefile that was good", err), func() { s.refused.Add(1) })
}

// reportWarnings reports, in an Event about the ConfigMap, which parts of the Corefile have no
// effect. It reports nothing if there are no such parts or the same message was reported last.
func (s *Server) reportWarnings(about *v1.ConfigMap, reports agent.Reporter, all []corefile.Warning) {
	if len(all) == 0 {
		s.source.lastMessage = ""
		return
	}
	var lines []string
	for _, w := range all {
		lines = append(lines, w.String())
	}
	s.reportEvent(about, reports, "CorefileNotUnderstood",
		"A part of the Corefile has no effect: "+strings.Join(lines, "; "), func() {})
}

// reportEvent reports an Event about the Corefile's ConfigMap, unless the same message was reported
// last. It calls beforeReport before it reports. All nodes report the same message, which the API
// aggregates into one Event with a count.
func (s *Server) reportEvent(about *v1.ConfigMap, reports agent.Reporter, reason, message string, beforeReport func()) {
	const limit = 1024 // limit of the API's validation
	if len(message) > limit {
		message = message[:limit-3] + "..."
	}
	if about == nil || s.source.lastMessage == message {
		return
	}
	s.source.lastMessage = message
	beforeReport()
	s.cfg.Log.Warn("the Corefile in ConfigMap kube-system/coredns", "reason", reason, "message", message)
	now := metav1.NewTime(time.Now())
	reports.Event(&v1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s.%016x", about.Name, now.UnixNano()),
			Namespace: about.Namespace},
		InvolvedObject: v1.ObjectReference{Kind: "ConfigMap", APIVersion: "v1", Namespace: about.Namespace,
			Name: about.Name, UID: about.UID},
		Reason: reason, Message: message, Type: v1.EventTypeWarning, FirstTimestamp: now,
		LastTimestamp: now, Count: 1,
		Source: v1.EventSource{Component: "dns", Host: s.cfg.Node}, ReportingController: "keelson.dev/dns",
		ReportingInstance: s.cfg.Node,
	})
}
