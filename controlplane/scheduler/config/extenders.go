package config

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	file "k8s.io/kube-scheduler/config/v1"
)

// Limits on the number of extenders and on the timeout of a request to an extender.
const (
	maxExtenders = 16
	// largest permitted timeout: pods are scheduled one after the other, so a request delays all
	// later pods
	maxTimeout = 30 * time.Second
)

// checkExtenders returns an error if a configured extender is invalid. It also makes the plugin
// NodeResourcesFit of all profiles ignore the resources that an extender manages with
// ignoredByScheduler.
func (c *Config) checkExtenders() error {
	if len(c.Extenders) > maxExtenders {
		return fmt.Errorf("extenders: %d extenders: want at most %d", len(c.Extenders), maxExtenders)
	}
	binders := 0
	for i := range c.Extenders {
		e := &c.Extenders[i]
		if err := checkExtender(e); err != nil {
			return fmt.Errorf("extenders[%d].%w", i, err)
		}
		if e.BindVerb != "" {
			if binders++; binders > 1 {
				return fmt.Errorf("extenders[%d].bindVerb: another extender binds already: want at most one", i)
			}
		}
		for _, r := range e.ManagedResources {
			if r.IgnoredByScheduler {
				c.ignoreResource(r.Name)
			}
		}
	}
	return nil
}

// ignoreResource adds the resource to the ignoredResources of the plugin NodeResourcesFit in all
// profiles.
func (c *Config) ignoreResource(resource string) {
	for i := range c.Profiles {
		a := &c.Profiles[i].Args
		if a.Fit == nil {
			a.Fit = &file.NodeResourcesFitArgs{}
		}
		if !slices.Contains(a.Fit.IgnoredResources, resource) {
			a.Fit.IgnoredResources = append(a.Fit.IgnoredResources, resource)
		}
	}
}

func checkExtender(e *file.Extender) error {
	u, err := url.Parse(e.URLPrefix)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.RawQuery != "" || u.Fragment != "" {
		return fmt.Errorf("urlPrefix: %q: want a URL such as https://host:8443/path", e.URLPrefix)
	}
	if u.User != nil {
		return errors.New("urlPrefix: it contains a user: leave it out, and use the certificates of tlsConfig")
	}
	verbs := 0
	for field, verb := range map[string]string{"filterVerb": e.FilterVerb, "prioritizeVerb": e.PrioritizeVerb,
		"preemptVerb": e.PreemptVerb, "bindVerb": e.BindVerb} {
		if verb != "" {
			verbs++
		}
		if _, err := url.Parse(verb); err != nil || strings.ContainsAny(verb, "?#") || strings.HasPrefix(verb, "/") {
			return fmt.Errorf("%s: %q: want the part of the URL after urlPrefix and a /, such as filter", field, verb)
		}
	}
	switch {
	case verbs == 0:
		return errors.New("filterVerb: the extender has no verb: set at least one, or remove the extender")
	case e.PrioritizeVerb != "" && (e.Weight < 1 || e.Weight > 1<<20):
		return fmt.Errorf("weight: %d: want 1 to %d where there is a prioritizeVerb", e.Weight, 1<<20)
	case e.PrioritizeVerb == "" && e.Weight != 0:
		return fmt.Errorf("weight: %d: it applies to prioritizeVerb, which is not set: leave it out", e.Weight)
	case e.HTTPTimeout.Duration < 0 || e.HTTPTimeout.Duration > maxTimeout:
		return fmt.Errorf("httpTimeout: %v: want 0s, which means 5s, to %v", e.HTTPTimeout.Duration, maxTimeout)
	case (e.EnableHTTPS || e.TLSConfig != nil) && u.Scheme != "https":
		return fmt.Errorf("urlPrefix: %q: want https:// with enableHTTPS and tlsConfig", e.URLPrefix)
	}
	if t := e.TLSConfig; t != nil {
		if (t.CertFile != "" || len(t.CertData) > 0) != (t.KeyFile != "" || len(t.KeyData) > 0) {
			return errors.New("tlsConfig.certFile: want both the certificate and its key, or neither")
		}
		if t.Insecure && (t.CAFile != "" || len(t.CAData) > 0) {
			return errors.New("tlsConfig.insecure: it cannot be combined with caFile: remove one of them")
		}
	}
	for i, r := range e.ManagedResources {
		if !strings.Contains(r.Name, "/") || len(validation.IsQualifiedName(r.Name)) > 0 {
			return fmt.Errorf("managedResources[%d].name: %q: want the name of an extended resource, such as "+
				"example.com/gpu", i, r.Name)
		}
	}
	return nil
}
