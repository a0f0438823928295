package apiserver_test

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/authz"
)

// interferingAuthorizer calls before when the API server is about to update the role "edit".
type interferingAuthorizer struct {
	authz.Authorizer
	left   atomic.Int32
	before func()
}

func (m *interferingAuthorizer) Authorize(ctx context.Context, a *authz.Attributes) (authz.Decision, string) {
	if a.User.Name == api.UserAPIServer && a.Verb == "update" && a.Name == "edit" && m.left.Add(-1) >= 0 {
		m.before()
	}
	return m.Authorizer.Authorize(ctx, a)
}

// Default roles are completed while other clients write them, and no write is lost.
func TestDefaultRolesAreReconciledConcurrently(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	roles := r.Admin().RbacV1().ClusterRoles()
	have, err := roles.Get(ctx, "edit", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	have.AggregationRule, have.Labels, have.Rules = nil, nil, nil
	if _, err := roles.Update(ctx, have, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	m := &interferingAuthorizer{Authorizer: r.Server.Authorizer()}
	m.left.Store(3)
	m.before = func() {
		c, err := roles.Get(ctx, "edit", metav1.GetOptions{})
		if err != nil {
			t.Error(err)
			return
		}
		c.Rules = append(c.Rules, rbacv1.PolicyRule{Verbs: []string{"get"}, APIGroups: []string{"example.com"},
			Resources: []string{"things"}})
		if _, err := roles.Update(ctx, c, metav1.UpdateOptions{}); err != nil {
			t.Error(err)
		}
	}
	r.Server.SetAuthorizer(m)
	if err := r.Setup.EnsureBootstrap(ctx, 0); err != nil {
		t.Fatal(err)
	}
	after, err := roles.Get(ctx, "edit", metav1.GetOptions{})
	if err != nil || after.AggregationRule == nil || m.left.Load() >= 0 {
		t.Fatalf("%+v, %v, %d", after, err, m.left.Load())
	}
	if n := len(slices.DeleteFunc(after.Rules, func(p rbacv1.PolicyRule) bool {
		return !slices.Contains(p.Resources, "things")
	})); n != 3 {
		t.Errorf("%d of 3 rules of others are left", n)
	}
}
