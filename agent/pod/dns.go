package pod

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The documented limits of a pod's resolv.conf.
const (
	maxNameservers = 3
	maxSearches    = 32
	maxSearchChars = 2048
)

// The event reasons for a pod's resolv.conf, as in the kubelet.
const (
	reasonDNSForming  = "DNSConfigForming"
	reasonDNSFallback = "MissingClusterDNS"
)

// dns returns the pod's resolv.conf. It emits an event for each entry that was omitted or differs
// from the pod's DNS policy.
func (w *worker) dns(pod *v1.Pod) (*cri.DNSConfig, error) {
	var servers []string
	if w.cfg.ClusterDNS != nil {
		servers = w.cfg.ClusterDNS()
	}
	policy := dnsPolicy(pod)
	var host string
	if policy != v1.DNSNone {
		var err error
		if host, err = w.nodeResolv(pod); err != nil {
			return nil, err
		}
	}
	c, told := resolvers(pod, host, servers, w.cfg.Objects.Cluster().Domain)
	for _, e := range told {
		if e.reason == reasonDNSFallback && w.cfg.ClusterDNS == nil {
			continue // no cluster DNS is configured, so its absence is expected
		}
		w.events.event(pod, "", v1.EventTypeWarning, e.reason, e.message)
	}
	return c, nil
}

// resolvedConf is the file in which systemd-resolved lists its upstream servers.
const resolvedConf = "/run/systemd/resolve/resolv.conf"

// nodeResolv returns the text of the node's resolv.conf. If that file names only loopback resolvers
// (systemd-resolved), a pod with its own network cannot reach them. Such a pod gets the upstream
// servers of systemd-resolved, if there are any.
func (w *worker) nodeResolv(pod *v1.Pod) (string, error) {
	file, resolved := cmp.Or(w.cfg.ResolvConf, "/etc/resolv.conf"), cmp.Or(w.cfg.ResolvedConf, resolvedConf)
	host, err := readOrNone(file)
	if err != nil || pod.Spec.HostNetwork {
		return host, err
	}
	if servers := parseResolv(host).Servers; len(servers) == 0 || slices.ContainsFunc(servers, reachable) {
		return host, nil
	}
	beyond, err := readOrNone(resolved)
	if err == nil && slices.ContainsFunc(parseResolv(beyond).Servers, reachable) {
		return beyond, nil
	}
	return host, err
}

// maxResolv bounds the bytes read of the node's resolver configuration.
const maxResolv = 1 << 20

// readOrNone returns the text of a file, or "" if the file does not exist.
func readOrNone(file string) (string, error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	var b []byte
	if err == nil {
		b, err = io.ReadAll(io.LimitReader(f, maxResolv))
		f.Close()
	}
	if err != nil {
		return "", fmt.Errorf("reading the node's resolver configuration: %w", err)
	}
	return string(b), nil
}

// reachable reports whether a nameserver can be reached from another network namespace: it is not a
// loopback address. A string that is not an address counts as reachable.
func reachable(server string) bool {
	a, err := netip.ParseAddr(server)
	return err != nil || !a.Unmap().IsLoopback()
}

// dnsPolicy returns the effective DNS policy: ClusterFirst becomes Default for a pod in the host's
// network.
func dnsPolicy(pod *v1.Pod) v1.DNSPolicy {
	if (pod.Spec.DNSPolicy == v1.DNSClusterFirst || pod.Spec.DNSPolicy == "") && pod.Spec.HostNetwork {
		return v1.DNSDefault
	}
	return pod.Spec.DNSPolicy
}

// dnsEvent is a warning event about a pod's resolv.conf.
type dnsEvent struct{ reason, message string }

// resolvers builds the pod's resolv.conf from host, the text of the node's resolv.conf, and from
// servers, the addresses of the cluster DNS. domain is the cluster domain. It also returns the
// events to emit.
func resolvers(pod *v1.Pod, host string, servers []string, domain string) (*cri.DNSConfig, []dnsEvent) {
	c := &cri.DNSConfig{}
	var told []dnsEvent
	policy := dnsPolicy(pod)
	if policy != v1.DNSNone {
		c = parseResolv(host)
	}
	nodes := true // whether the servers are the node's
	if policy == v1.DNSClusterFirst || policy == v1.DNSClusterFirstWithHostNet || policy == "" {
		if len(servers) == 0 {
			told = append(told, dnsEvent{reasonDNSFallback, fmt.Sprintf(
				"the cluster has no DNS (Service kube-system/kube-dns), so that dnsPolicy %s is treated as Default", cmpPolicy(policy))})
		} else {
			c.Servers, nodes = slices.Clone(servers), false
			c.Searches = append([]string{pod.Namespace + ".svc." + domain, "svc." + domain, domain}, c.Searches...)
			c.Options = []string{"ndots:5"}
		}
	}
	if all := len(c.Servers); nodes && !pod.Spec.HostNetwork {
		if c.Servers = slices.DeleteFunc(c.Servers, func(s string) bool { return !reachable(s) }); len(c.Servers) < all {
			told = append(told, dnsEvent{reasonDNSForming, fmt.Sprintf(
				"the node's resolv.conf has nameservers at its loopback, where nobody answers in a pod: they were left out, in force is: %s; "+
					"--resolv-conf of the agent may name a file with others", cmp.Or(strings.Join(c.Servers, " "), "none"))})
		}
	}
	c = mergeDNS(c, pod.Spec.DNSConfig)
	return c, append(told, limitDNS(c)...)
}

func cmpPolicy(p v1.DNSPolicy) v1.DNSPolicy {
	if p == "" {
		return v1.DNSClusterFirst
	}
	return p
}

// limitDNS truncates a resolv.conf to the limits of resolvers. It returns an event for each
// truncation.
func limitDNS(c *cri.DNSConfig) (told []dnsEvent) {
	if len(c.Servers) > maxNameservers {
		c.Servers = c.Servers[:maxNameservers]
		told = append(told, dnsEvent{reasonDNSForming, fmt.Sprintf(
			"resolv.conf has %d nameservers at most; some were left out, in force is: %s", maxNameservers, strings.Join(c.Servers, " "))})
	}
	cut := len(c.Searches) > maxSearches
	if cut {
		c.Searches = c.Searches[:maxSearches]
	}
	for len(c.Searches) > 0 && len(strings.Join(c.Searches, " ")) > maxSearchChars {
		c.Searches = c.Searches[:len(c.Searches)-1]
		cut = true
	}
	if cut {
		told = append(told, dnsEvent{reasonDNSForming, fmt.Sprintf(
			"resolv.conf has %d search domains at most, of %d characters together; some were left out, in force is: %s", maxSearches, maxSearchChars, strings.Join(c.Searches, " "))})
	}
	return told
}

// mergeDNS adds the pod's dnsConfig: its servers and search domains come after those of the policy.
// Its options replace options of the same name.
func mergeDNS(c *cri.DNSConfig, extra *v1.PodDNSConfig) *cri.DNSConfig {
	if extra != nil {
		c.Servers = append(c.Servers, extra.Nameservers...)
		c.Searches = append(c.Searches, extra.Searches...)
		for _, o := range extra.Options {
			text := o.Name
			if o.Value != nil && *o.Value != "" {
				text += ":" + *o.Value
			}
			c.Options = slices.DeleteFunc(slices.Clone(c.Options), func(old string) bool {
				name, _, _ := strings.Cut(old, ":")
				return name == o.Name
			})
			c.Options = append(c.Options, text)
		}
	}
	c.Servers, c.Searches = unique(c.Servers), unique(c.Searches)
	return c
}

func unique(in []string) []string {
	var out []string
	for _, s := range in {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// parseResolv parses a resolv.conf as resolvers do: the last search line counts, and options add
// up.
func parseResolv(text string) *cri.DNSConfig {
	c := &cri.DNSConfig{}
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		switch f[0] {
		case "nameserver":
			c.Servers = append(c.Servers, f[1])
		case "search", "domain":
			c.Searches = nil
			for _, s := range f[1:] {
				if s != "." {
					c.Searches = append(c.Searches, strings.TrimSuffix(s, "."))
				}
			}
		case "options":
			c.Options = append(c.Options, f[1:]...)
		}
	}
	return c
}
