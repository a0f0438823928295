package authz

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	rbacv1 "k8s.io/api/rbac/v1"

	"keelson.dev/keelson/controlplane/api"
)

// RBAC is an authorizer that applies RBAC roles and bindings. It indexes bindings by subject, so
// that a decision reads only the bindings of the requesting user, however many bindings exist.
type RBAC struct {
	mu       sync.RWMutex
	roles    map[roleKey][]rbacv1.PolicyRule
	bindings map[roleKey]*binding      // by namespace and name of the binding
	bySubj   map[subjectKey][]*binding // bindings by subject and namespace
}

// roleKey identifies a role or binding. An empty namespace means a ClusterRole or
// ClusterRoleBinding.
type roleKey struct{ namespace, name string }

// subjectKey identifies a user or group that bindings in one namespace ("" = cluster-wide)
// reference.
type subjectKey struct {
	namespace string
	group     bool
	name      string
}

type binding struct {
	key      roleKey
	subjects []subjectKey
	role     roleKey
	roleKind string
}

// NewRBAC returns an RBAC without roles and bindings.
func NewRBAC() *RBAC {
	return &RBAC{
		roles:    make(map[roleKey][]rbacv1.PolicyRule),
		bindings: make(map[roleKey]*binding),
		bySubj:   make(map[subjectKey][]*binding),
	}
}

// Authorize returns Allow if the user has a binding to a role with a matching rule, otherwise
// NoOpinion.
func (z *RBAC) Authorize(_ context.Context, a *Attributes) (Decision, string) {
	var by *binding
	var missing []string
	z.visitBindings(a.User, a.Namespace, func(b *binding, rules []rbacv1.PolicyRule, found bool) bool {
		if !found {
			missing = append(missing, fmt.Sprintf("%s.rbac.authorization.k8s.io %q not found",
				strings.ToLower(b.roleKind), b.role.name))
			return true
		}
		for i := range rules {
			if allowsAttributes(&rules[i], a) {
				by = b
				return false
			}
		}
		return true
	})
	switch {
	case by != nil && a.WantReason:
		return Allow, by.allowReason(a.User)
	case by != nil:
		return Allow, ""
	case len(missing) > 0:
		slices.Sort(missing)
		return NoOpinion, "RBAC: " + strings.Join(slices.Compact(missing), ", ")
	}
	return NoOpinion, ""
}

// Rules returns all rules that apply to the user in the namespace. With namespace "", it returns
// only the rules of ClusterRoleBindings.
func (z *RBAC) Rules(u api.User, namespace string) []rbacv1.PolicyRule {
	var out []rbacv1.PolicyRule
	z.visitBindings(u, namespace, func(_ *binding, rules []rbacv1.PolicyRule, _ bool) bool {
		out = append(out, rules...)
		return true
	})
	return out
}

// Role returns the rules of a role; kind is "Role" or "ClusterRole".
func (z *RBAC) Role(kind, namespace, name string) ([]rbacv1.PolicyRule, bool) {
	if kind == "ClusterRole" {
		namespace = ""
	}
	z.mu.RLock()
	defer z.mu.RUnlock()
	rules, ok := z.roles[roleKey{namespace, name}]
	return rules, ok
}

// visitBindings calls call with each binding that applies to the user in the namespace, and the
// rules of its role, until call returns false. found is false if the role does not exist. The read
// lock is held during the calls.
func (z *RBAC) visitBindings(
	u api.User, namespace string, call func(b *binding, rules []rbacv1.PolicyRule, found bool) bool,
) {
	z.mu.RLock()
	defer z.mu.RUnlock()
	one := func(k subjectKey) bool {
		for _, b := range z.bySubj[k] {
			rules, found := z.roles[b.role]
			if !call(b, rules, found) {
				return false
			}
		}
		return true
	}
	in := func(namespace string) bool {
		if !one(subjectKey{namespace, false, u.Name}) {
			return false
		}
		for _, g := range u.Groups {
			if !one(subjectKey{namespace, true, g}) {
				return false
			}
		}
		return true
	}
	if in("") && namespace != "" {
		in(namespace)
	}
}

func (b *binding) allowReason(u api.User) string {
	kind, where := "ClusterRoleBinding", b.key.name
	if b.key.namespace != "" {
		kind, where = "RoleBinding", b.key.name+"/"+b.key.namespace
	}
	return fmt.Sprintf("RBAC: allowed by %s %q of %s %q to User %q", kind, where, b.roleKind, b.role.name, u.Name)
}

// setRole stores the rules of a Role or ClusterRole. The write lock must be held.
func (z *RBAC) setRole(o api.Object) {
	var rules []rbacv1.PolicyRule
	switch r := o.(type) {
	case *rbacv1.Role:
		rules = r.Rules
	case *rbacv1.ClusterRole:
		rules = r.Rules
	}
	z.roles[roleKey{o.GetNamespace(), o.GetName()}] = rules
}

func (z *RBAC) setBinding(o api.Object) {
	key := roleKey{o.GetNamespace(), o.GetName()}
	z.dropBinding(key)
	var ref rbacv1.RoleRef
	var subjects []rbacv1.Subject
	switch b := o.(type) {
	case *rbacv1.RoleBinding:
		ref, subjects = b.RoleRef, b.Subjects
	case *rbacv1.ClusterRoleBinding:
		ref, subjects = b.RoleRef, b.Subjects
	}
	b := &binding{key: key, roleKind: ref.Kind, role: roleKey{key.namespace, ref.Name}}
	if ref.Kind == "ClusterRole" {
		b.role.namespace = ""
	}
	for _, s := range subjects {
		k := subjectKey{namespace: key.namespace, name: s.Name}
		switch s.Kind {
		case rbacv1.GroupKind:
			k.group = true
		case rbacv1.ServiceAccountKind:
			ns := s.Namespace
			if ns == "" {
				ns = key.namespace
			}
			k.name = api.ServiceAccountPrefix + ns + ":" + s.Name
		}
		b.subjects = append(b.subjects, k)
		z.bySubj[k] = append(z.bySubj[k], b)
	}
	z.bindings[key] = b
}

func (z *RBAC) dropBinding(key roleKey) {
	b := z.bindings[key]
	if b == nil {
		return
	}
	delete(z.bindings, key)
	for _, s := range b.subjects {
		rest := slices.DeleteFunc(z.bySubj[s], func(x *binding) bool { return x == b })
		if len(rest) == 0 {
			delete(z.bySubj, s)
			continue
		}
		z.bySubj[s] = rest
	}
}

// rbacSink is a follow.Sink that stores the objects of one of the four RBAC kinds in an RBAC.
type rbacSink struct {
	rbac      *RBAC
	binding   bool
	clustered bool
}

func (s rbacSink) Replace(objects []api.Object) {
	s.rbac.mu.Lock()
	defer s.rbac.mu.Unlock()
	if s.binding {
		for key := range s.rbac.bindings {
			if (key.namespace == "") == s.clustered {
				s.rbac.dropBinding(key)
			}
		}
	} else {
		for key := range s.rbac.roles {
			if (key.namespace == "") == s.clustered {
				delete(s.rbac.roles, key)
			}
		}
	}
	for _, o := range objects {
		s.storeObject(o)
	}
}

func (s rbacSink) Set(o api.Object) {
	s.rbac.mu.Lock()
	defer s.rbac.mu.Unlock()
	s.storeObject(o)
}

func (s rbacSink) storeObject(o api.Object) {
	if s.binding {
		s.rbac.setBinding(o)
		return
	}
	s.rbac.setRole(o)
}

func (s rbacSink) Remove(o api.Object) {
	s.rbac.mu.Lock()
	defer s.rbac.mu.Unlock()
	key := roleKey{o.GetNamespace(), o.GetName()}
	if s.binding {
		s.rbac.dropBinding(key)
		return
	}
	delete(s.rbac.roles, key)
}
