package server

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"slices"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/keyrotation"
	"keelson.dev/keelson/controlplane/operator"
	"keelson.dev/keelson/controlplane/pki"
)

// maxKeysResponse is the maximum size of another replica's response about its keys, in bytes.
const maxKeysResponse = 4 << 20

// wireKeys creates the key rotation of this replica, without an API client. wireReplica sets the
// client later, when the API server exists.
func (r *Replica) wireKeys(tokens *pki.ServiceTokens) (err error) {
	r.trust.keys, err = keyrotation.New(keyrotation.Config{
		Name: r.cfg.Name, DataDir: r.cfg.DataDir, Cluster: r.cluster.Name, Trust: r.trust.shared, CA: r.trust.ca,
		Tokens:  tokens,
		Secrets: r.trust.secrets, Store: r.store, Replica: keyRotationReplica{r}, Log: r.log.With("part", "keys"),
	})
	r.members.SetKeys(r.trust.keys)
	return err
}

// keyRotationReplica gives key rotation access to the other components of the replica. It
// implements keyrotation.Replica.
type keyRotationReplica struct{ r *Replica }

// FetchOwnKeys sends a request to the replica with the peer address peer, and returns the IDs of
// the keys that this other replica has itself. It implements keyrotation.Replica.
func (k keyRotationReplica) FetchOwnKeys(ctx context.Context, peer string) (all api.ClusterKeys, err error) {
	if all, err = k.fetchKeys(ctx, peer, api.PathClusterKeys+"?local=true"); err != nil {
		return all, errors.New(clusterhttp.Reason(err))
	}
	return all, nil
}

// FetchClusterKeys requests the IDs of the keys of all members from another replica, which collects
// them. peer is its peer address. FetchClusterKeys implements keyrotation.Replica.
func (k keyRotationReplica) FetchClusterKeys(ctx context.Context, peer string) (api.ClusterKeys, error) {
	return k.fetchKeys(ctx, peer, api.PathClusterKeys)
}

func (k keyRotationReplica) fetchKeys(ctx context.Context, peer, path string) (all api.ClusterKeys, err error) {
	resp, err := k.r.members.Peers().GetFromPeer(ctx, peer, path)
	if err != nil {
		return all, err
	}
	return all, clusterhttp.ReadJSON(resp, maxKeysResponse, "its release cannot rotate keys", &all)
}

// NodeKeys returns the nodes with a session on this replica and the CAs that they trust, sorted by
// the nodes' names. It implements keyrotation.Replica.
func (k keyRotationReplica) NodeKeys() (nodes []api.ClusterNodeKeys) {
	for node, a := range k.r.nodes.NodeAuthorities() {
		nodes = append(nodes, api.ClusterNodeKeys{Name: node, Silent: a.Unreported, Believes: a.Trusted,
			Shows: a.Issuers})
	}
	slices.SortFunc(nodes, func(a, b api.ClusterNodeKeys) int { return cmp.Compare(a.Name, b.Name) })
	return nodes
}

// RequireLevel returns an error that names feature if the cluster's feature level is below level.
// It implements keyrotation.Replica.
func (k keyRotationReplica) RequireLevel(ctx context.Context, feature string, level uint32) error {
	return k.r.members.Level().RequireLevel(ctx, feature, level)
}

// ReconnectPeers makes new connections to other replicas use the current CA and certificate. It
// implements keyrotation.Replica.
func (k keyRotationReplica) ReconnectPeers() { k.r.members.Peers().Reconnect() }

// wireCertificates sets r.trust.certificates: the certificates that this replica renews and the CAs
// that it trusts. The operator API lists them.
func (r *Replica) wireCertificates(serving, front *pki.Rotator) {
	peers := r.trust.secrets.Authorities()
	r.trust.certificates = &operator.OwnCertificates{
		Holder: r.cfg.Name, Log: r.log,
		Authorities: func() map[string][]*x509.Certificate {
			return map[string][]*x509.Certificate{
				operator.UseCluster: r.trust.keys.ClusterCAs(), operator.UsePeers: peers.Authorities(),
				operator.UseFrontProxy: {r.trust.keys.FrontProxyCA().Cert},
			}
		},
		Leaves: map[string]func() (*tls.Certificate, error){
			operator.UseServing: serving.Certificate, operator.UsePeers: peers.Certificate,
			operator.UseFrontProxy: front.Certificate,
		},
	}
}

// frontProxy returns the client certificate with which this replica authenticates to aggregated API
// servers. It also returns the CA certificates by which these servers verify this replica and its
// clients.
func (r *Replica) frontProxy(serving *pki.Rotator) *apiserver.FrontProxy {
	own := pki.Client(pki.FrontProxyUser)
	own.Life = r.cfg.Timing.CertificateLife
	front := pki.NewRotator(func(now time.Time) (*tls.Certificate, error) {
		issued, err := r.trust.keys.FrontProxyCA().Issue(own, now)
		if err != nil {
			return nil, err
		}
		return &issued.TLS, nil
	}, time.Now)
	r.wireCertificates(serving, front)
	return &apiserver.FrontProxy{Certificate: front, CA: func() []byte {
		return r.trust.keys.FrontProxyCA().PEM()
	}, ClientCA: r.trust.ca.PEM}
}
