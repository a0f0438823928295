package server

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/serviceaccount"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/server/rotation"
	"keelson.dev/keelson/internal/wait"
)

// The cluster's CA is believed by more than the replicas: by nodes, which say so over their sessions, and by clients, of
// which the certificates tell that are shown at the API.

// clusterAuthorities are the CA that signs, and those that are believed beside it.
func (r *Replica) clusterAuthorities() []*x509.Certificate {
	signs := r.ca.Signs().Cert
	all := []*x509.Certificate{signs}
	for _, c := range r.ca.Believed() {
		if !c.Equal(signs) {
			all = append(all, c)
		}
	}
	return all
}

// renewByCA has what this replica holds open and writes down go by the CA of now.
func (r *Replica) renewByCA() error {
	signs, all := r.ca.Signs().Cert, r.ca.Pool()
	if r.renewedBy != nil && r.renewedBy.Equal(signs) && r.renewedFor.Equal(all) {
		return nil
	}
	front, err := r.keys.frontProxyCA()
	if err != nil {
		return err
	}
	r.front.Store(front)
	r.peers.renew()
	if err := r.renewAdmin(); err != nil {
		return err
	}
	r.renewedBy, r.renewedFor = signs, all
	return nil
}

// frontProxyCA is that of now: it lasts as long as the cluster's CA.
func (k *keys) frontProxyCA() (*pki.CA, error) {
	t, err := k.load()
	if err != nil {
		return nil, err
	}
	return t.FrontProxyCA()
}

// adminEvery is how often the age of the administrator's certificate is looked at.
const adminEvery = time.Hour

// keepAdmin renews the administrator's kubeconfig of the data folder before its certificate expires, until ctx ends. It checks
// the certificate's age each time that the interval has passed. A failed renewal is attempted again at the next check: the
// replica serves without that file.
func (r *Replica) keepAdmin(ctx context.Context, interval time.Duration) error {
	for {
		if err := r.renewAdmin(); err != nil {
			r.log.Warn("the administrator's kubeconfig of this folder could not be renewed", "err", err)
		}
		if err := wait.Delay(ctx, interval); err != nil {
			return err
		}
	}
}

// renewAdmin keeps the administrator's kubeconfig of the data folder good, where there is one: Init has made it.
func (r *Replica) renewAdmin() error {
	r.admin.Lock()
	defer r.admin.Unlock()
	path := filepath.Join(r.cfg.DataDir, datadir.AdminFile)
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	next, err := renewedKubeconfig(raw, r.ca, time.Now())
	if err != nil {
		r.log.Warn("the administrator's kubeconfig of this folder is left as it is", "file", path, "err", err)
		return nil
	}
	if next == nil {
		return nil
	}
	return pki.WriteFile(path, next)
}

// renewedKubeconfig is a kubeconfig that Init wrote, with the authorities of now and a certificate by the one that signs,
// which is renewed at two thirds of its life; nil when it has them.
func renewedKubeconfig(raw []byte, ca *pki.ClusterCA, now time.Time) ([]byte, error) {
	c, err := clientcmd.Load(raw)
	if err != nil {
		return nil, err
	}
	at := c.Contexts[c.CurrentContext]
	if at == nil || c.Clusters[at.Cluster] == nil || c.AuthInfos[at.AuthInfo] == nil {
		return nil, errors.New("its current context has no cluster or no user")
	}
	cluster, user := c.Clusters[at.Cluster], c.AuthInfos[at.AuthInfo]
	leaf, err := pki.DecodeCert(user.ClientCertificateData)
	if err != nil {
		return nil, fmt.Errorf("its client certificate: %w", err)
	}
	good := pki.IssuedBy(leaf, ca.Signs().Cert) && now.Before(leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore)*2/3))
	if slices.Equal(cluster.CertificateAuthorityData, ca.PEM()) && good {
		return nil, nil
	}
	cluster.CertificateAuthorityData = ca.PEM()
	if !good {
		issued, err := ca.Signs().Issue(pki.Client(leaf.Subject.CommonName, leaf.Subject.Organization...), now)
		if err != nil {
			return nil, err
		}
		user.ClientCertificateData, user.ClientKeyData = issued.CertPEM, issued.KeyPEM
	}
	return clientcmd.Write(*c)
}

// sighted are users whose certificates by a former CA were seen, by serial number. The zero value is ready to use.
type sighted struct {
	mu    sync.Mutex
	of    string // the exchange
	users map[string]api.ClusterUser
}

// maxSighted bounds them.
const maxSighted = 256

// sawClient is told of every request with a client certificate.
func (k *keys) sawClient(leaf *x509.Certificate) {
	rec := k.seen.Load()
	if rec.Kind != rotation.ClusterCA || rec.Step != rotation.Wait || k.ca.By(leaf) != rec.Old ||
		slices.Contains(leaf.Subject.Organization, api.GroupNodes) { // nodes are asked themselves
		return
	}
	serial, now := leaf.SerialNumber.Text(16), time.Now().UnixMilli()
	s := &k.users
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of != rec.ID {
		s.of, s.users = rec.ID, map[string]api.ClusterUser{}
	}
	if _, known := s.users[serial]; !known && len(s.users) >= maxSighted {
		return
	}
	s.users[serial] = api.ClusterUser{Name: leaf.Subject.CommonName, Ends: leaf.NotAfter.UnixMilli(), Seen: now}
}

func (s *sighted) all(of string) map[string]api.ClusterUser {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of != of {
		return nil
	}
	out := make(map[string]api.ClusterUser, len(s.users))
	for serial, u := range s.users {
		out[serial] = u
	}
	return out
}

// holder is what this replica tells of itself: its keys, and during an exchange of the CA its nodes and users.
func (r *Replica) holder() api.ClusterKeyHolder {
	out := api.ClusterKeyHolder{Name: r.cfg.Name, Keys: r.keys.all()}
	rec := r.keys.seen.Load()
	if rec.Kind != rotation.ClusterCA || !rec.Active() {
		return out
	}
	out.Users = r.keys.users.all(rec.ID)
	for node, a := range r.fleet.NodeAuthorities() {
		out.Nodes = append(out.Nodes, api.ClusterNodeKeys{Name: node, Silent: a.Silent, Believes: a.Believes, Shows: a.Shows})
	}
	slices.SortFunc(out.Nodes, func(a, b api.ClusterNodeKeys) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// nodesOf are the nodes that are known, by what replicas say of those that are connected. A node of which two replicas say
// something is as far as the one says that has it less far.
func nodesOf(known []string, all []api.ClusterKeyHolder) (out []rotation.Node) {
	byName := map[string]*rotation.Node{}
	for _, h := range all {
		for _, n := range h.Nodes {
			have := byName[n.Name]
			if have == nil {
				have = &rotation.Node{Name: n.Name, Believes: n.Believes}
				byName[n.Name] = have
			}
			have.Believes = slices.DeleteFunc(slices.Clone(have.Believes), func(id string) bool { return !slices.Contains(n.Believes, id) })
			have.Shows = append(have.Shows, n.Shows...)
			if n.Silent {
				have.Problem = "the release of its agent does not say whom it believes: bring it up to date"
			}
		}
	}
	for _, name := range known {
		if byName[name] == nil {
			byName[name] = &rotation.Node{Name: name, Problem: "it is away: start it, or delete the Node if it is gone for good"}
		}
	}
	for _, n := range byName {
		out = append(out, *n)
	}
	slices.SortFunc(out, func(a, b rotation.Node) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// cachedNodes are the names of all Nodes of which this replica has heard.
func (r *Replica) cachedNodes() (names []string) {
	for _, o := range client.Informer[*v1.Node](r.informers).GetStore().List() {
		if n, ok := o.(*v1.Node); ok {
			names = append(names, n.Name)
		}
	}
	return names
}

// knownNodes are the names of all Nodes, and of machines that have enrolled and have yet to make theirs, as of now.
func (r *Replica) knownNodes(ctx context.Context) (names []string, err error) {
	c := r.client.As(api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}})
	// The claims first: a machine that makes its Node between the two is in both.
	claims, err := client.List[*v1.Secret](ctx, c, pki.TokenNamespace, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("listing machines that have enrolled: %w", err)
	}
	for _, s := range claims {
		if claim, ok := pki.ClaimOf(s); ok && !claim.Ended(time.Now()) {
			names = append(names, claim.Node)
		}
	}
	nodes, err := client.List[*v1.Node](ctx, c, "", metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("listing Nodes: %w", err)
	}
	for _, n := range nodes {
		names = append(names, n.Name)
	}
	return names, nil
}

// rootsBehind are the namespaces in which pods do not read of the new CA yet.
func (r *Replica) rootsBehind() (out []string) {
	want := string(r.ca.PEM())
	maps := client.Informer[*v1.ConfigMap](r.informers).GetIndexer()
	for _, o := range client.Informer[*v1.Namespace](r.informers).GetStore().List() {
		ns, ok := o.(*v1.Namespace)
		if !ok || ns.DeletionTimestamp != nil {
			continue
		}
		have, found, err := maps.GetByKey(ns.Name + "/" + serviceaccount.RootCAMap)
		cm, _ := have.(*v1.ConfigMap)
		if err != nil || !found || cm == nil || cm.Data[serviceaccount.RootCAKey] != want {
			out = append(out, ns.Name)
		}
	}
	slices.Sort(out)
	return out
}

// usersOfFormerCA tell who is known by a certificate of the former CA, and where pods would not know the new one.
func (r *Replica) usersOfFormerCA(rec rotation.Record) (out []string) {
	for _, ns := range r.rootsBehind() {
		out = append(out, fmt.Sprintf("namespace %s: its ConfigMap %s is to be written", ns, serviceaccount.RootCAMap))
	}
	for _, u := range rec.UsersOfFormer(time.Now()) {
		out = append(out, fmt.Sprintf("user %s: a certificate by the former CA, which ends %s, was used %s: 'kctl cluster renew' where it is used",
			u.Name, stamp(u.Ends), stamp(u.Seen)))
	}
	return out
}

func stamp(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }

// serveKubeconfig answers POST /cluster/kubeconfig with what a kubeconfig is made of; authorization has happened.
func (r *Replica) serveKubeconfig(w http.ResponseWriter, req *http.Request, d *deed) {
	var q api.ClusterKubeconfig
	if !posted(w, req, &q) {
		return
	}
	out := api.ClusterKubeconfigResult{CA: r.ca.PEM()}
	if len(q.CSR) > 0 {
		caller := api.CallerOf(req.Context())
		d.object = caller.User.Name
		leaf, err := r.provedBy(req, caller)
		if err != nil {
			refuse(w, http.StatusBadRequest, fmt.Errorf("csr: %w", err))
			return
		}
		cert, err := r.ca.Signs().Renew(q.CSR, leaf, time.Now())
		if err != nil {
			refuse(w, http.StatusBadRequest, fmt.Errorf("csr: %w", err))
			return
		}
		out.Certificate = cert
	}
	answer(w, out)
}

// provedBy is the certificate of the cluster by which a request's sender is known, as himself.
func (r *Replica) provedBy(req *http.Request, caller api.Caller) (*x509.Certificate, error) {
	if req.TLS == nil || len(req.TLS.PeerCertificates) == 0 {
		return nil, fmt.Errorf("%s is not known by a client certificate of the cluster: there is none to be renewed", caller.User.Name)
	}
	leaf := req.TLS.PeerCertificates[0]
	if caller.User.Name != leaf.Subject.CommonName || caller.Sender.Name != caller.User.Name || !authn.ProvedBy(caller.Sender, leaf) {
		return nil, fmt.Errorf("%s is not known by the client certificate of this connection, but in another way: there is none to be renewed", caller.User.Name)
	}
	if err := r.ca.Verifies(leaf); err != nil {
		return nil, fmt.Errorf("the client certificate of %s is none of the cluster's: %w", caller.User.Name, err)
	}
	return leaf, nil
}
