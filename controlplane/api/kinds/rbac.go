package kinds

import (
	rbacv1 "k8s.io/api/rbac/v1"

	"keelson.dev/keelson/controlplane/api"
)

func roleKind() *api.Kind {
	k := newKind[rbacv1.Role, rbacv1.RoleList](names{
		gv: rbacv1.SchemeGroupVersion, kind: "Role", plural: "roles", singular: "role",
	})
	k.Namespaced = true
	return k
}

func clusterRoleKind() *api.Kind {
	k := newKind[rbacv1.ClusterRole, rbacv1.ClusterRoleList](names{
		gv: rbacv1.SchemeGroupVersion, kind: "ClusterRole", plural: "clusterroles", singular: "clusterrole",
	})
	return k
}

func roleBindingKind() *api.Kind {
	k := newKind[rbacv1.RoleBinding, rbacv1.RoleBindingList](names{
		gv: rbacv1.SchemeGroupVersion, kind: "RoleBinding", plural: "rolebindings", singular: "rolebinding",
	})
	k.Namespaced = true
	return k
}

func clusterRoleBindingKind() *api.Kind {
	k := newKind[rbacv1.ClusterRoleBinding, rbacv1.ClusterRoleBindingList](names{
		gv: rbacv1.SchemeGroupVersion, kind: "ClusterRoleBinding", plural: "clusterrolebindings", singular: "clusterrolebinding",
	})
	return k
}
