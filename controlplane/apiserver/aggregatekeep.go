package apiserver

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

// autoManaged labels the APIServices that are kept as they are here.
const (
	autoManaged     = "kube-aggregator.kubernetes.io/automanaged"
	managedOnStart  = "onstart" // of built-in groups
	managedForKinds = "true"    // of groups of custom resources: they go with the kinds
	customVersion   = 100       // the version priority of custom resources
)

// EnsureAPIServices brings the APIServices of what is served here to what they shall be. One that a user has pointed
// to a Service, or made for a group of custom resources, stays as it is. The leader calls it whenever the kinds or an
// APIService change; it writes only what differs.
func (s *Server) EnsureAPIServices(ctx context.Context, fence uint64) error {
	want := s.localAPIServices()
	var errs []error
	for _, have := range s.cachedAPIServices(ctx) {
		w := want[have.Name]
		delete(want, have.Name)
		label := have.Labels[autoManaged]
		switch {
		case w == nil && label == managedForKinds && have.DeletionTimestamp == nil:
			if err := s.write(ctx, fence, api.VerbDelete, have); err != nil && !apierrors.IsNotFound(err) {
				errs = append(errs, err)
			}
		case w == nil || label == "" || have.DeletionTimestamp != nil:
		case !reflect.DeepEqual(have.Spec, w.Spec):
			next := have.DeepCopy()
			next.Spec = w.Spec
			errs = append(errs, s.write(ctx, fence, api.VerbUpdate, next))
		}
	}
	for _, w := range want {
		if err := s.write(ctx, fence, api.VerbCreate, w); err != nil && !apierrors.IsAlreadyExists(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// localAPIServices are those of the group versions that are served here, by name.
func (s *Server) localAPIServices() map[string]*apiregistrationv1.APIService {
	out := map[string]*apiregistrationv1.APIService{}
	versions := map[string][]string{}
	for _, k := range s.cfg.Kinds.Table().Shown() {
		gv := k.GVK.GroupVersion()
		name := gv.Version + "." + gv.Group
		if out[name] != nil {
			continue
		}
		managed := map[string]string{autoManaged: managedOnStart}
		switch {
		case !discovery.BuiltIn(gv.Group):
			managed[autoManaged] = managedForKinds
		case gv.Group == "metrics.k8s.io":
			managed = nil // metrics-server's manifest points it to a Service, and that stays
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
			out[v+"."+group].Spec.VersionPriority = versionPriority(schema.GroupVersion{Group: group, Version: v}, len(all)-i)
		}
	}
	return out
}

// versionPriority is that of a version of a group, which is better the larger rank is.
func versionPriority(gv schema.GroupVersion, rank int) int32 {
	switch {
	case gv.Group == "":
		return 1
	case !discovery.BuiltIn(gv.Group):
		return customVersion + int32(rank) - 1
	case !strings.ContainsAny(gv.Version, "ab"):
		return int32(15 + 15*(rank-1))
	}
	return int32(rank)
}

// What servers in the cluster read to know whom they may believe.
const (
	authenticationConfig = "extension-apiserver-authentication"
	authenticationReader = "extension-apiserver-authentication-reader"
)

// EnsureAuthenticationConfig keeps ConfigMap kube-system/extension-apiserver-authentication true, and makes the Role by
// which servers read it where it is missing.
func (s *Server) EnsureAuthenticationConfig(ctx context.Context, fence uint64) error {
	if s.cfg.FrontProxy == nil {
		return nil
	}
	meta := metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: authenticationReader}
	errs := []error{
		s.ensure(ctx, fence, &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{authenticationConfig},
			Verbs: []string{"get", "list", "watch"},
		}}}),
		s.ensure(ctx, fence, &rbacv1.RoleBinding{
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

func (s *Server) ensureAuthenticationMap(ctx context.Context, fence uint64) error {
	want := map[string]string{
		"client-ca-file":                     string(s.cfg.FrontProxy.ClientCA()),
		"requestheader-client-ca-file":       string(s.cfg.FrontProxy.CA()),
		"requestheader-allowed-names":        jsonList(pki.FrontProxyUser),
		"requestheader-username-headers":     jsonList("X-Remote-User"),
		"requestheader-uid-headers":          jsonList("X-Remote-Uid"),
		"requestheader-group-headers":        jsonList("X-Remote-Group"),
		"requestheader-extra-headers-prefix": jsonList("X-Remote-Extra-"),
	}
	o, ok := s.known.Get(ctx, "configmaps", metav1.NamespaceSystem, authenticationConfig)
	have, is := o.(*corev1.ConfigMap)
	if !ok || !is {
		return s.write(ctx, fence, api.VerbCreate, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: authenticationConfig}, Data: want})
	}
	const ca = "requestheader-client-ca-file"
	if asGood(have.Data[ca], want[ca]) {
		want[ca] = have.Data[ca] // another replica signed it; the authority is the same
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
	return s.write(ctx, fence, api.VerbUpdate, next)
}

// asGood says whether a certificate is of the same key and subject as another and ends no sooner.
func asGood(a, b string) bool {
	ca, errA := pki.DecodeCert([]byte(a))
	cb, errB := pki.DecodeCert([]byte(b))
	return errA == nil && errB == nil && bytes.Equal(ca.RawSubjectPublicKeyInfo, cb.RawSubjectPublicKeyInfo) &&
		bytes.Equal(ca.RawSubject, cb.RawSubject) && ca.NotAfter.Equal(cb.NotAfter)
}

func jsonList(items ...string) string {
	data, _ := json.Marshal(items) // strings: it cannot fail
	return string(data)
}

// ConcernsAPIServices says whether a change of obj may change what EnsureAPIServices and EnsureAuthenticationConfig keep.
func ConcernsAPIServices(obj api.Object) bool {
	switch o := obj.(type) {
	case *apiregistrationv1.APIService:
		return true
	case *corev1.ConfigMap:
		return o.Namespace == metav1.NamespaceSystem && o.Name == authenticationConfig
	}
	return false
}
