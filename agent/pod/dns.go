package pod

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The documented limits of resolv.conf.
const (
	maxNameservers = 3
	maxSearches    = 32
)

// dns is the pod's resolv.conf. ClusterFirst without a cluster DNS server is the node's own.
func (w *worker) dns(pod *v1.Pod) (*cri.DNSConfig, error) {
	policy := pod.Spec.DNSPolicy
	if policy == v1.DNSClusterFirst && pod.Spec.HostNetwork {
		policy = v1.DNSDefault
	}
	var servers []string
	if w.cfg.ClusterDNS != nil {
		servers = w.cfg.ClusterDNS()
	}
	c := &cri.DNSConfig{}
	if policy != v1.DNSNone {
		file := w.cfg.ResolvConf
		if file == "" {
			file = "/etc/resolv.conf"
		}
		b, err := os.ReadFile(file)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("reading the node's resolver configuration: %w", err)
		}
		c = parseResolv(string(b))
	}
	if len(servers) > 0 && (policy == v1.DNSClusterFirst || policy == v1.DNSClusterFirstWithHostNet) {
		domain := w.cfg.Objects.Cluster().Domain
		c.Servers = servers
		c.Searches = append([]string{pod.Namespace + ".svc." + domain, "svc." + domain, domain}, c.Searches...)
		c.Options = []string{"ndots:5"}
	}
	return mergeDNS(c, pod.Spec.DNSConfig), nil
}

func mergeDNS(c *cri.DNSConfig, extra *v1.PodDNSConfig) *cri.DNSConfig {
	if extra != nil {
		c.Servers = append(c.Servers, extra.Nameservers...)
		c.Searches = append(c.Searches, extra.Searches...)
		for _, o := range extra.Options {
			text := o.Name
			if o.Value != nil {
				text += ":" + *o.Value
			}
			c.Options = slices.DeleteFunc(c.Options, func(old string) bool {
				name, _, _ := strings.Cut(old, ":")
				return name == o.Name
			})
			c.Options = append(c.Options, text)
		}
	}
	c.Servers, c.Searches = unique(c.Servers), unique(c.Searches)
	c.Servers, c.Searches = c.Servers[:min(len(c.Servers), maxNameservers)], c.Searches[:min(len(c.Searches), maxSearches)]
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
		case "search":
			c.Searches = nil
			for _, s := range f[1:] {
				if s != "." {
					c.Searches = append(c.Searches, strings.TrimSuffix(s, "."))
				}
			}
		case "options":
			c.Options = f[1:]
		}
	}
	return c
}
