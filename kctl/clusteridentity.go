package kctl

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"keelson.dev/keelson/internal/clusterid"
)

// kctl records the latest incarnation of a cluster in the kubeconfig, as an extension of the
// cluster entry, when it first receives one. Each request carries it, so that an abandoned replica
// refuses the request. A cluster that was never recovered or restored has incarnation 0, for which
// nothing is written.

const (
	identityExtension        = "keelson.dev/cluster-identity"
	identityExtensionVersion = 1
)

// recordedIdentity is the content of the extension. Later releases may add fields.
type recordedIdentity struct {
	Version     int    `json:"version"`
	Cluster     string `json:"cluster"`
	Incarnation uint64 `json:"incarnation"`
}

// compareIdentities makes all clients of the flags compare the identity of the cluster. Warnings
// are written to warn.
func compareIdentities(flags *genericclioptions.ConfigFlags, warn io.Writer) {
	flags.WrapConfigFn = func(c *rest.Config) *rest.Config {
		loader := flags.ToRawKubeConfigLoader()
		raw, err := loader.RawConfig()
		if err != nil {
			return c
		}
		name := clusterEntry(flags, &raw)
		if raw.Clusters[name] == nil {
			return c
		}
		k := &knownIdentity{access: loader.ConfigAccess(), entry: name, latest: identityIn(raw.Clusters[name]), warn: warn}
		c.Wrap(func(next http.RoundTripper) http.RoundTripper { return &comparingTransport{next, k} })
		return c
	}
}

// clusterEntry returns the name of the kubeconfig's cluster entry in use.
func clusterEntry(flags *genericclioptions.ConfigFlags, raw *clientcmdapi.Config) string {
	if flags.ClusterName != nil && *flags.ClusterName != "" {
		return *flags.ClusterName
	}
	current := raw.CurrentContext
	if flags.Context != nil && *flags.Context != "" {
		current = *flags.Context
	}
	if c := raw.Contexts[current]; c != nil {
		return c.Cluster
	}
	return ""
}

// identityIn returns the identity that a cluster entry records; zero where it records none that
// can be read.
func identityIn(c *clientcmdapi.Cluster) clusterid.Identity {
	u, ok := c.Extensions[identityExtension].(*runtime.Unknown)
	if !ok {
		return clusterid.Identity{}
	}
	var rec recordedIdentity
	if json.Unmarshal(u.Raw, &rec) != nil {
		return clusterid.Identity{}
	}
	return clusterid.Identity{Cluster: rec.Cluster, Incarnation: rec.Incarnation}
}

// knownIdentity is the latest identity of the cluster in use.
type knownIdentity struct {
	access clientcmd.ConfigAccess
	entry  string
	warn   io.Writer

	mu     sync.Mutex
	latest clusterid.Identity
}

func (k *knownIdentity) current() clusterid.Identity {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.latest
}

// observe refuses a replica of an earlier incarnation and records a later one.
func (k *knownIdentity) observe(theirs clusterid.Identity, replica string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case theirs.Before(k.latest):
		return &clusterid.AbandonedError{Replica: replica, Newest: k.latest}
	case theirs == k.latest || theirs.Cluster == "":
		return nil
	case theirs.Incarnation == 0 && k.latest.Cluster == "":
		return nil // there is no earlier incarnation to refuse
	}
	k.latest = theirs
	if err := k.writeToKubeconfig(); err != nil {
		fmt.Fprintf(k.warn, "warning: the cluster was recovered or restored, "+
			"and its new identity could not be recorded in the kubeconfig: %v\n", err)
	}
	return nil
}

// writeToKubeconfig writes the latest identity to the kubeconfig. The caller holds mu.
func (k *knownIdentity) writeToKubeconfig() error {
	raw, err := json.Marshal(recordedIdentity{identityExtensionVersion, k.latest.Cluster, k.latest.Incarnation})
	if err != nil {
		return err
	}
	all, err := k.access.GetStartingConfig()
	if err != nil {
		return err
	}
	c := all.Clusters[k.entry]
	if c == nil {
		return fmt.Errorf("cluster entry %q no longer exists", k.entry)
	}
	if c.Extensions == nil {
		c.Extensions = map[string]runtime.Object{}
	}
	c.Extensions[identityExtension] = &runtime.Unknown{Raw: raw, ContentType: runtime.ContentTypeJSON}
	return clientcmd.ModifyConfig(k.access, *all, false)
}

// comparingTransport sends the known identity with each request and compares that of the replica.
type comparingTransport struct {
	next  http.RoundTripper
	known *knownIdentity
}

// RoundTrip implements http.RoundTripper.
func (t *comparingTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set(clusterid.Header, t.known.current().String())
	resp, err := t.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	theirs, err := clusterid.Parse(resp.Header.Get(clusterid.Header))
	if err != nil {
		return resp, nil // a release that has no identities
	}
	if err := t.known.observe(theirs, req.URL.Host); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// WrappedRoundTripper returns the transport that is wrapped, for clients that look for its TLS
// settings.
func (t *comparingTransport) WrappedRoundTripper() http.RoundTripper { return t.next }
