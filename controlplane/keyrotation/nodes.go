package keyrotation

import (
	"cmp"
	"context"
	"crypto/x509"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/serviceaccount"
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
)

// Nodes and clients trust the cluster CA, too. Nodes report the CAs that they trust. Clients do
// not: the API server observes the certificates that they present.

// observedUsers are the users of client certificates of the previous CA, by the certificate's
// serial number. The zero value is ready to use.
type observedUsers struct {
	mu       sync.Mutex
	rotation string // ID of the rotation during which the users were observed
	users    map[string]api.ClusterUser
}

const maxObservedUsers = 256

// observeClient records the user of the client certificate leaf if the rotation waits for users of
// the previous CA, and that CA has signed the certificate. It ignores nodes, which report their
// certificates themselves.
func (f *follower) observeClient(leaf *x509.Certificate) {
	record := f.current.Load()
	if record.Kind != rotation.ClusterCA || record.Step != rotation.Wait || f.ca.IssuerID(leaf) != record.Old ||
		slices.Contains(leaf.Subject.Organization, api.GroupNodes) {
		return
	}
	serial, now := leaf.SerialNumber.Text(16), time.Now().UnixMilli()
	s := &f.users
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rotation != record.ID {
		s.rotation, s.users = record.ID, map[string]api.ClusterUser{}
	}
	if _, known := s.users[serial]; !known && len(s.users) >= maxObservedUsers {
		return
	}
	s.users[serial] = api.ClusterUser{Name: leaf.Subject.CommonName, Ends: leaf.NotAfter.UnixMilli(), Seen: now}
}

// usersDuring returns the users that were observed during the rotation with the ID rotationID.
func (s *observedUsers) usersDuring(rotationID string) map[string]api.ClusterUser {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rotation != rotationID {
		return nil
	}
	return maps.Clone(s.users)
}

// OwnReport returns the IDs of this replica's keys. During a rotation of the cluster CA, the report
// also contains the nodes with a session on this replica, and the observed users of the previous
// CA.
func (r *Rotator) OwnReport() api.ClusterKeyHolder {
	report := api.ClusterKeyHolder{Name: r.config.Name, Keys: r.keys.allKeys()}
	record := r.keys.current.Load()
	if record.Kind == rotation.ClusterCA && record.Active() {
		report.Users = r.keys.users.usersDuring(record.ID)
		report.Nodes = r.config.Replica.NodeKeys()
	}
	return report
}

// nodesOf returns the nodes in names and the nodes that replicas report, sorted by name. If several
// replicas report a node, it trusts the CAs that are in all of these reports. A node that no
// replica reports has a problem.
func nodesOf(names []string, reports []api.ClusterKeyHolder) []rotation.Node {
	byName := map[string]*rotation.Node{}
	for _, report := range reports {
		for _, n := range report.Nodes {
			node := byName[n.Name]
			if node == nil {
				node = &rotation.Node{Name: n.Name, Trusted: n.Believes}
				byName[n.Name] = node
			}
			node.Trusted = slices.DeleteFunc(slices.Clone(node.Trusted), func(id string) bool {
				return !slices.Contains(n.Believes, id)
			})
			node.Presented = append(node.Presented, n.Shows...)
			if n.Silent {
				node.Problem = "the release of its agent does not report the accepted CAs: upgrade it"
			}
		}
	}
	for _, name := range names {
		if byName[name] == nil {
			byName[name] = &rotation.Node{Name: name,
				Problem: "it is away: start it, or delete the Node if it is gone for good"}
		}
	}
	var nodes []rotation.Node
	for _, n := range byName {
		nodes = append(nodes, *n)
	}
	slices.SortFunc(nodes, func(a, b rotation.Node) int { return cmp.Compare(a.Name, b.Name) })
	return nodes
}

// cachedNodes returns the names of the Nodes in the informer cache.
func cachedNodes(informers *client.Informers) (names []string) {
	for _, o := range client.Informer[*v1.Node](informers).GetStore().List() {
		if n, ok := o.(*v1.Node); ok {
			names = append(names, n.Name)
		}
	}
	return names
}

// listNodes returns the names of all Nodes, and of enrolled machines that have not created their
// Node yet. It reads them from the store. A name can occur twice.
func (r *Rotator) listNodes(ctx context.Context) (names []string, err error) {
	c := asAPIServer(r.client)
	// The claims of enrolled machines are read first: a machine that creates its Node between the
	// two reads is then in both lists, and not in none.
	claims, err := client.List[*v1.Secret](ctx, c, pki.TokenNamespace, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("listing enrolled machines: %w", err)
	}
	for _, s := range claims {
		if claim, ok := pki.ParseClaim(s); ok && !claim.IsExpired(time.Now()) {
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

// namespacesWithoutCA returns the namespaces in which the ConfigMap with the root certificates does
// not contain the current CAs. Pods in these namespaces would reject a certificate of the new CA.
func (r *Rotator) namespacesWithoutCA() (names []string) {
	want := string(r.config.CA.PEM())
	configMaps := client.Informer[*v1.ConfigMap](r.informers).GetIndexer()
	for _, o := range client.Informer[*v1.Namespace](r.informers).GetStore().List() {
		ns, ok := o.(*v1.Namespace)
		if !ok || ns.DeletionTimestamp != nil {
			continue
		}
		stored, found, err := configMaps.GetByKey(ns.Name + "/" + serviceaccount.RootCAMap)
		cm, _ := stored.(*v1.ConfigMap)
		if err != nil || !found || cm == nil || cm.Data[serviceaccount.RootCAKey] != want {
			names = append(names, ns.Name)
		}
	}
	slices.Sort(names)
	return names
}

// usersOfPreviousCA describes the users that still use certificates of the previous CA, and the
// namespaces in which pods would reject a certificate of the new CA.
func (r *Rotator) usersOfPreviousCA(record rotation.Record) (users []string) {
	for _, ns := range r.namespacesWithoutCA() {
		users = append(users, fmt.Sprintf("namespace %s: its ConfigMap %s has not been updated yet", ns,
			serviceaccount.RootCAMap))
	}
	for _, u := range record.UsersOfOldCA(time.Now()) {
		users = append(users,
			fmt.Sprintf("user %s: a certificate of the previous CA, which expires %s, was used %s: run 'kctl cluster "+
				"renew' where it is used",
				u.Name, formatMillis(u.Expires), formatMillis(u.LastUsed)))
	}
	return users
}

func formatMillis(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }
