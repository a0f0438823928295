package criconfig

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

// The limits of a pod's resolv.conf that Kubernetes documents.
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

// dnsConfig returns the pod's resolv.conf. It emits an event for each entry that was omitted or
// differs from the pod's DNS policy.
func (b *Builder) dnsConfig(pod *v1.Pod) (*cri.DNSConfig, error) {
	var servers []string
	if b.cfg.ClusterDNS != nil {
		servers = b.cfg.ClusterDNS()
	}
	policy := effectiveDNSPolicy(pod)
	var host string
	if policy != v1.DNSNone {
		var err error
		if host, err = b.nodeResolvConf(pod); err != nil {
			return nil, err
		}
	}
	c, events := buildDNSConfig(pod, host, servers, b.cfg.Objects.Cluster().Domain)
	for _, e := range events {
		if e.reason == reasonDNSFallback && b.cfg.ClusterDNS == nil {
			continue // no cluster DNS is configured, so its absence is expected
		}
		b.warn(pod, e.reason, e.message)
	}
	return c, nil
}

// resolvedConf is the file in which systemd-resolved lists its upstream servers.
const resolvedConf = "/run/systemd/resolve/resolv.conf"

// nodeResolvConf returns the text of the node's resolv.conf. If that file names only loopback
// resolvers (systemd-resolved), a pod with its own network cannot reach them. Such a pod gets the
// upstream servers of systemd-resolved, if there are any.
func (b *Builder) nodeResolvConf(pod *v1.Pod) (string, error) {
	file, resolved := cmp.Or(b.cfg.ResolvConf, "/etc/resolv.conf"), cmp.Or(b.cfg.ResolvedConf, resolvedConf)
	host, err := readFileIfExists(file)
	if err != nil || pod.Spec.HostNetwork {
		return host, err
	}
	if servers := parseResolvConf(host).Servers; len(servers) == 0 || slices.ContainsFunc(servers, isReachable) {
		return host, nil
	}
	upstream, err := readFileIfExists(resolved)
	if err == nil && slices.ContainsFunc(parseResolvConf(upstream).Servers, isReachable) {
		return upstream, nil
	}
	return host, err
}

// maxResolv bounds the bytes read of the node's resolver configuration.
const maxResolv = 1 << 20

// readFileIfExists returns the text of a file, or "" if the file does not exist.
func readFileIfExists(file string) (string, error) {
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

// isReachable reports whether a nameserver can be reached from another network namespace: it is not
// a loopback address. A string that is not an address counts as reachable.
func isReachable(server string) bool {
	a, err := netip.ParseAddr(server)
	return err != nil || !a.Unmap().IsLoopback()
}

// effectiveDNSPolicy returns the pod's DNS policy; ClusterFirst becomes Default for a pod in the
// host's network, as in Kubernetes.
func effectiveDNSPolicy(pod *v1.Pod) v1.DNSPolicy {
	if (pod.Spec.DNSPolicy == v1.DNSClusterFirst || pod.Spec.DNSPolicy == "") && pod.Spec.HostNetwork {
		return v1.DNSDefault
	}
	return pod.Spec.DNSPolicy
}

// dnsEvent is a warning event about a pod's resolv.conf.
type dnsEvent struct{ reason, message string }

// buildDNSConfig builds the pod's resolv.conf. host is the text of the node's resolv.conf, servers
// are the addresses of the cluster DNS, and domain is the cluster domain. It also returns the
// events to emit.
func buildDNSConfig(pod *v1.Pod, host string, servers []string, domain string) (*cri.DNSConfig, []dnsEvent) {
	c := &cri.DNSConfig{}
	var events []dnsEvent
	policy := effectiveDNSPolicy(pod)
	if policy != v1.DNSNone {
		c = parseResolvConf(host)
	}
	nodes := true // whether the servers are the node's
	if policy == v1.DNSClusterFirst || policy == v1.DNSClusterFirstWithHostNet || policy == "" {
		if len(servers) == 0 {
			events = append(events, dnsEvent{reasonDNSFallback, fmt.Sprintf(
				"the cluster has no DNS server (Service kube-system/kube-dns): dnsPolicy %s is treated as Default",
				dnsPolicyOrDefault(policy))})
		} else {
			c.Servers, nodes = slices.Clone(servers), false
			c.Searches = append([]string{pod.Namespace + ".svc." + domain, "svc." + domain, domain}, c.Searches...)
			c.Options = []string{"ndots:5"}
		}
	}
	if total := len(c.Servers); nodes && !pod.Spec.HostNetwork {
		c.Servers = slices.DeleteFunc(c.Servers, func(s string) bool { return !isReachable(s) })
		if len(c.Servers) < total {
			events = append(events, dnsEvent{reasonDNSForming, fmt.Sprintf(
				"nameservers at loopback addresses in the node's resolv.conf were omitted, because pods cannot reach "+
					"them, the applied nameserver line is: %s; "+
					"set the agent's --resolv-conf to a file with other nameservers",
				cmp.Or(strings.Join(c.Servers, " "), "none"))})
		}
	}
	c = mergeDNS(c, pod.Spec.DNSConfig)
	return c, append(events, truncateDNS(c)...)
}

func dnsPolicyOrDefault(policy v1.DNSPolicy) v1.DNSPolicy {
	if policy == "" {
		return v1.DNSClusterFirst
	}
	return policy
}

// truncateDNS truncates a resolv.conf to the limits of resolvers. It returns an event for each
// truncation.
func truncateDNS(config *cri.DNSConfig) (events []dnsEvent) {
	if len(config.Servers) > maxNameservers {
		config.Servers = config.Servers[:maxNameservers]
		events = append(events, dnsEvent{reasonDNSForming, fmt.Sprintf(
			"Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: %s",
			strings.Join(config.Servers, " "))})
	}
	cut := len(config.Searches) > maxSearches
	if cut {
		config.Searches = config.Searches[:maxSearches]
	}
	for len(config.Searches) > 0 && len(strings.Join(config.Searches, " ")) > maxSearchChars {
		config.Searches = config.Searches[:len(config.Searches)-1]
		cut = true
	}
	if cut {
		events = append(events, dnsEvent{reasonDNSForming, fmt.Sprintf(
			"Search Line limits were exceeded, some search paths have been omitted, the applied search line is: %s",
			strings.Join(config.Searches, " "))})
	}
	return events
}

// mergeDNS adds the pod's dnsConfig to the resolv.conf of its DNS policy. The pod's servers and
// search domains come after the policy's. The pod's options replace options of the same name.
func mergeDNS(config *cri.DNSConfig, extra *v1.PodDNSConfig) *cri.DNSConfig {
	if extra != nil {
		config.Servers = append(config.Servers, extra.Nameservers...)
		config.Searches = append(config.Searches, extra.Searches...)
		for _, o := range extra.Options {
			text := o.Name
			if o.Value != nil && *o.Value != "" {
				text += ":" + *o.Value
			}
			config.Options = slices.DeleteFunc(slices.Clone(config.Options), func(old string) bool {
				name, _, _ := strings.Cut(old, ":")
				return name == o.Name
			})
			config.Options = append(config.Options, text)
		}
	}
	config.Servers, config.Searches = removeDuplicates(config.Servers), removeDuplicates(config.Searches)
	return config
}

func removeDuplicates(texts []string) []string {
	var out []string
	for _, s := range texts {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// parseResolvConf parses a resolv.conf as resolvers do: the last search line counts, and options
// add up.
func parseResolvConf(text string) *cri.DNSConfig {
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
