package testcluster

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/apiserver"
	authzconfig "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/controlplane/registry/registrytest"
	"keelson.dev/keelson/raftstore"
)

// Address ranges of the cluster.
const (
	serviceCIDR = "10.96.0.0/16"
	podCIDR     = "10.244.0.0/16"
)

// lostNodeToleration is how long a pod stays on a lost node by default. The tests of evictions
// would otherwise wait 5 minutes.
const lostNodeToleration = time.Second

// newAPIServer returns a registry on store, and an API server on it that does not serve HTTP. Its
// admission is that of a cluster: built-in plugins, validation, policies and webhooks. It
// authorizes every request, because the tests compare the calls of controllers with their rules
// (CheckRules).
func newAPIServer(
	t *testing.T, store raftstore.Store, table *api.Kinds, log *slog.Logger, addresses func() *podaddress.Index,
) (*registry.Registry, *apiserver.Server) {
	t.Helper()
	scheme := api.Scheme()
	reg := registry.New(store, table, registry.WithScheme(scheme),
		registry.WithCompanions(&corev1.Service{}, networking.ServiceCompanions))
	everything, err := authzconfig.Load(authzconfig.Config{
		Options: authzconfig.Options{Modes: []string{authzconfig.AlwaysAllow}}, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	return reg, apiserver.New(apiserver.Config{
		Name: "cp1", Registry: reg, Kinds: table, Scheme: scheme, Log: log, Authorization: everything,
		Network: apiserver.NetworkConfig{
			ServiceCIDR: netip.MustParsePrefix(serviceCIDR), PodCIDRs: []netip.Prefix{netip.MustParsePrefix(podCIDR)},
			PodAddresses: addresses,
		},
		Admission: apiserver.AdmissionConfig{LostNodeToleration: lostNodeToleration},
	})
}

// createDefaults creates the objects that admission requires and that every cluster has: the system
// namespaces and priority classes, and the default ServiceAccount of namespace default.
func (w *Cluster) createDefaults(server *apiserver.Server) {
	w.T.Helper()
	if err := server.Bootstrap().EnsureSystemObjects(w.Ctx, 0); err != nil {
		w.T.Fatal(err)
	}
	w.CreateObject(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault,
		Name: "default"}})
}

// EarlierRelease returns a client that writes to the store of w as an earlier release did: without
// admission, and with the kinds of that release. change turns the current kinds into those; nil
// leaves them unchanged. The client is only for objects that admission refuses or completes today,
// but that an earlier release may have stored.
func (w *Cluster) EarlierRelease(change func(*api.Kinds)) *client.Client {
	w.T.Helper()
	table := kinds.All()
	if change != nil {
		change(table)
	}
	reg := registry.New(w.Store, table)
	ctx, cancel := context.WithCancel(w.Ctx)
	done := make(chan error, 1)
	go func() { done <- reg.Run(ctx) }()
	w.T.Cleanup(func() { cancel(); <-done })
	<-reg.Ready()
	return client.New(registrytest.NewBackend(reg), table).As(administrator())
}

func administrator() api.User {
	return api.User{Name: "admin", Groups: []string{api.GroupMasters, api.GroupAuthenticated}}
}

// CreateNamespace creates a namespace and its default ServiceAccount, which admission requires for
// pods.
func (w *Cluster) CreateNamespace(name string) {
	w.T.Helper()
	w.CreateObject(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	w.CreateObject(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "default"}})
}

// CreateObjectAs does the same as CreateObject, but as an authenticated user with this name.
func (w *Cluster) CreateObjectAs(user string, o api.Object) {
	w.T.Helper()
	w.createAs(w.Deps.Client.As(api.User{Name: user, Groups: []string{api.GroupAuthenticated}}), o)
}

// createAs creates o with client c. It fails the test if the creation fails.
func (w *Cluster) createAs(c *client.Client, o api.Object) {
	w.T.Helper()
	kind := c.Kinds().ByType(o)
	r := &api.Request{Verb: api.VerbCreate, Kind: kind, Namespace: o.GetNamespace(), Object: o.DeepCopyObject()}
	if _, err := c.Do(w.Ctx, r); err != nil {
		w.T.Fatalf("creating %s/%s: %v", o.GetNamespace(), o.GetName(), err)
	}
}
