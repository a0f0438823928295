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

// When a cluster is recovered from one replica or restored from a backup, it gets a new incarnation
// number. Replicas with data of an earlier incarnation are abandoned and must not be used. kctl
// records the latest incarnation of a cluster in the kubeconfig, as an extension of the cluster
// entry. Each request contains it, so that an abandoned replica refuses the request. A cluster that
// was never recovered or restored has incarnation 0, which is not recorded.

const (
	identityExtension        = "keelson.dev/cluster-identity"
	identityExtensionVersion = 1
)

// recordedIdentity is the content of the kubeconfig extension keelson.dev/cluster-identity: the
// cluster's ID and its latest incarnation. The incarnation is the number of the cluster's last
// recovery or restore. Later releases may add fields.
type recordedIdentity struct {
	Version     int    `json:"version"`
	Cluster     string `json:"cluster"`
	Incarnation uint64 `json:"incarnation"`
}

// compareIdentities changes flags, from which all API clients are built. Each client then compares
// the cluster identity that a replica reports with the identity in the kubeconfig; see
// comparingTransport. Warnings are written to warn.
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
		k := &knownIdentity{access: loader.ConfigAccess(), entry: name,
			latest: identityIn(raw.Clusters[name]), warn: warn}
		c.Wrap(func(next http.RoundTripper) http.RoundTripper { return &comparingTransport{next, k} })
		return c
	}
}

// clusterEntry returns the name of the cluster entry in kubeconfig raw that flags select. It
// considers --cluster, --context and the current context, in this order. It returns "" if they
// select no entry.
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

// identityIn returns the cluster identity that kubeconfig entry c records. It returns the zero
// Identity if there is no valid record.
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

// knownIdentity holds the latest known identity of the cluster in use: its ID and its incarnation,
// the number of its last recovery or restore. It also holds the kubeconfig entry that records the
// identity.
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

// observe compares reported, the cluster identity in a replica's response, with the latest known
// identity. The incarnation in an identity changes when the cluster is recovered or restored. If
// reported has an earlier incarnation of the same cluster, the replica is abandoned and observe
// returns an AbandonedError. Otherwise a new identity is stored and recorded in the kubeconfig; if
// recording fails, observe writes a warning. replica is the replica's address, for the error.
func (k *knownIdentity) observe(reported clusterid.Identity, replica string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case reported.Before(k.latest):
		return &clusterid.AbandonedError{Replica: replica, Newest: k.latest}
	case reported == k.latest || reported.Cluster == "":
		return nil
	case reported.Incarnation == 0 && k.latest.Cluster == "":
		return nil // the cluster was never recovered or restored
	}
	k.latest = reported
	if err := k.writeToKubeconfig(); err != nil {
		fmt.Fprintf(k.warn, "warning: the cluster was recovered or restored, "+
			"and its new identity could not be recorded in the kubeconfig: %v\n", err)
	}
	return nil
}

// writeToKubeconfig writes the identity in k.latest to the cluster entry of the kubeconfig. The
// caller holds k.mu.
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
		return fmt.Errorf("the kubeconfig no longer has the cluster %q: run the command again with the right "+
			"--context or --kubeconfig", k.entry)
	}
	if c.Extensions == nil {
		c.Extensions = map[string]runtime.Object{}
	}
	c.Extensions[identityExtension] = &runtime.Unknown{Raw: raw, ContentType: runtime.ContentTypeJSON}
	return clientcmd.ModifyConfig(k.access, *all, false)
}

// comparingTransport is an http.RoundTripper that adds the known cluster identity to each request,
// and compares it with the identity in the response.
type comparingTransport struct {
	next  http.RoundTripper
	known *knownIdentity
}

// RoundTrip sends req with the known cluster identity. It returns an error if the response comes
// from a replica that was abandoned in a recovery or restore of the cluster.
func (t *comparingTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set(clusterid.Header, t.known.current().String())
	resp, err := t.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	theirs, err := clusterid.Parse(resp.Header.Get(clusterid.Header))
	if err != nil {
		return resp, nil // a replica of a release without identities
	}
	if err := t.known.observe(theirs, req.URL.Host); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// WrappedRoundTripper returns the underlying transport. client-go uses it to find the TLS settings.
func (t *comparingTransport) WrappedRoundTripper() http.RoundTripper { return t.next }
