package bootstrap

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiversion "k8s.io/apimachinery/pkg/version"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/discovery"
	"keelson.dev/keelson/controlplane/pki"
)

// AutoManagedLabel is the label of APIServices that EnsureAPIServices maintains. Its values are
// managedOnStart and managedForKinds.
const (
	AutoManagedLabel = "kube-aggregator.kubernetes.io/automanaged"
	managedOnStart   = "onstart" // for built-in groups
	// for groups of custom resources: the APIService is deleted when the last kind of its group
	// version is deleted
	managedForKinds       = "true"
	customVersionPriority = 100 // lowest versionPriority of groups of custom resources
)

// EnsureAPIServices creates, updates and deletes the APIServices of the group versions that this
// server serves itself. An APIService without AutoManagedLabel is not changed: a user pointed it to
// a Service or created it for a group of custom resources. The leader calls it whenever the served
// kinds or an APIService change; fence is the term of its leadership. It writes only differences.
func (s *Setup) EnsureAPIServices(ctx context.Context, fence uint64) error {
	want := s.LocalAPIServices()
	var errs []error
	for _, have := range s.config.APIServices(ctx) {
		w := want[have.Name]
		delete(want, have.Name)
		label := have.Labels[AutoManagedLabel]
		switch {
		case w == nil && label == managedForKinds && have.DeletionTimestamp == nil:
			if err := s.writeObject(ctx, fence, api.VerbDelete, have); err != nil && !apierrors.IsNotFound(err) {
				errs = append(errs, err)
			}
		case w == nil || label == "" || have.DeletionTimestamp != nil:
		case !reflect.DeepEqual(have.Spec, w.Spec):
			next := have.DeepCopy()
			next.Spec = w.Spec
			errs = append(errs, s.writeObject(ctx, fence, api.VerbUpdate, next))
		}
	}
	for _, w := range want {
		if err := s.writeObject(ctx, fence, api.VerbCreate, w); err != nil && !apierrors.IsAlreadyExists(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// LocalAPIServices returns the desired APIService of each group version that this server serves
// itself, by name.
func (s *Setup) LocalAPIServices() map[string]*apiregistrationv1.APIService {
	out := map[string]*apiregistrationv1.APIService{}
	versions := map[string][]string{}
	for _, k := range s.config.Kinds.Table().Visible() {
		gv := k.GVK.GroupVersion()
		name := gv.Version + "." + gv.Group
		if out[name] != nil {
			continue
		}
		managed := map[string]string{AutoManagedLabel: managedOnStart}
		switch {
		case !discovery.BuiltIn(gv.Group):
			managed[AutoManagedLabel] = managedForKinds
		case gv.Group == "metrics.k8s.io":
			managed = nil // metrics-server's manifest points this APIService to a Service, so it is not managed
		}
		versions[gv.Group] = append(versions[gv.Group], gv.Version)
		out[name] = &apiregistrationv1.APIService{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: managed},
			Spec: apiregistrationv1.APIServiceSpec{Group: gv.Group, Version: gv.Version,
				GroupPriorityMinimum: int32(discovery.Priority(gv.Group))},
		}
	}
	for group, all := range versions {
		slices.SortFunc(all, func(a, b string) int { return apiversion.CompareKubeAwareVersionStrings(b, a) })
		for i, v := range all {
			out[v+"."+group].Spec.VersionPriority = versionPriority(schema.GroupVersion{Group: group, Version: v},
				len(all)-i)
		}
	}
	return out
}

// versionPriority returns the versionPriority of an APIService. rank is the version's rank in its
// group, starting at 1 for the least preferred version.
func versionPriority(gv schema.GroupVersion, rank int) int32 {
	switch {
	case gv.Group == "":
		return 1
	case !discovery.BuiltIn(gv.Group):
		return customVersionPriority + int32(rank) - 1
	case !strings.ContainsAny(gv.Version, "ab"):
		return int32(15 + 15*(rank-1))
	}
	return int32(rank)
}

// Names of the ConfigMap with the CAs and header names by which aggregated API servers authenticate
// proxied requests, and of the Role that allows reading the ConfigMap.
const (
	AuthenticationConfigMap = "extension-apiserver-authentication"
	authenticationReader    = "extension-apiserver-authentication-reader"
)

// EnsureAuthenticationConfig creates or updates ConfigMap
// kube-system/extension-apiserver-authentication. It also creates the Role and RoleBinding that
// grant access to the ConfigMap, if they are missing. It does nothing without Config.ProxyCAs.
func (s *Setup) EnsureAuthenticationConfig(ctx context.Context, fence uint64) error {
	if s.config.ProxyCAs == nil {
		return nil
	}
	meta := metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: authenticationReader}
	errs := []error{
		s.ensureObject(ctx, fence, &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{""}, Resources: []string{"configmaps"},
			ResourceNames: []string{AuthenticationConfigMap},
			Verbs:         []string{"get", "list", "watch"},
		}}}),
		s.ensureObject(ctx, fence, &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "system::" + authenticationReader},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: authenticationReader},
			Subjects: []rbacv1.Subject{
				{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: api.UserController},
				{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: api.UserScheduler},
			},
		}),
		s.ensureAuthenticationMap(ctx, fence),
	}
	return errors.Join(errs...)
}

func (s *Setup) ensureAuthenticationMap(ctx context.Context, fence uint64) error {
	want := map[string]string{
		"client-ca-file":                     string(s.config.ProxyCAs.Client()),
		"requestheader-client-ca-file":       string(s.config.ProxyCAs.FrontProxy()),
		"requestheader-allowed-names":        jsonList(pki.FrontProxyUser),
		"requestheader-username-headers":     jsonList("X-Remote-User"),
		"requestheader-uid-headers":          jsonList("X-Remote-Uid"),
		"requestheader-group-headers":        jsonList("X-Remote-Group"),
		"requestheader-extra-headers-prefix": jsonList("X-Remote-Extra-"),
	}
	o, ok := s.config.Cluster.Get(ctx, "configmaps", metav1.NamespaceSystem, AuthenticationConfigMap)
	have, is := o.(*corev1.ConfigMap)
	if !ok || !is {
		return s.writeObject(ctx, fence, api.VerbCreate, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: AuthenticationConfigMap},
			Data:       want})
	}
	const ca = "requestheader-client-ca-file"
	if equivalentCerts(have.Data[ca], want[ca]) {
		want[ca] = have.Data[ca] // another replica issued this CA certificate; the key and subject are the same
	}
	next := have.DeepCopy()
	if next.Data == nil {
		next.Data = map[string]string{}
	}
	for k, v := range want {
		next.Data[k] = v
	}
	if reflect.DeepEqual(next.Data, have.Data) {
		return nil
	}
	return s.writeObject(ctx, fence, api.VerbUpdate, next)
}

// equivalentCerts reports whether two PEM certificates have the same key, subject and expiry.
func equivalentCerts(a, b string) bool {
	ca, errA := pki.DecodeCert([]byte(a))
	cb, errB := pki.DecodeCert([]byte(b))
	return errA == nil && errB == nil && bytes.Equal(ca.RawSubjectPublicKeyInfo, cb.RawSubjectPublicKeyInfo) &&
		bytes.Equal(ca.RawSubject, cb.RawSubject) && ca.NotAfter.Equal(cb.NotAfter)
}

func jsonList(items ...string) string {
	data, _ := json.Marshal(items) // a list of strings always encodes
	return string(data)
}

// ConcernsAPIServices reports whether a change of obj requires another call of EnsureAPIServices
// and EnsureAuthenticationConfig.
func ConcernsAPIServices(obj api.Object) bool {
	switch o := obj.(type) {
	case *apiregistrationv1.APIService:
		return true
	case *corev1.ConfigMap:
		return o.Namespace == metav1.NamespaceSystem && o.Name == AuthenticationConfigMap
	}
	return false
}
