package authz

import (
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// rule returns a rule that grants verbs on resources. Each list is separated by spaces. In groups,
// "core" is the core group when there are several.
func rule(verbs, groups, resources string, names ...string) rbacv1.PolicyRule {
	g := strings.Fields(groups)
	for i := range g {
		if g[i] == "core" {
			g[i] = ""
		}
	}
	if len(g) == 0 {
		g = []string{""}
	}
	return rbacv1.PolicyRule{Verbs: strings.Fields(verbs), APIGroups: g, Resources: strings.Fields(resources), ResourceNames: names}
}

func paths(verbs string, urls ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{Verbs: strings.Fields(verbs), NonResourceURLs: urls}
}

const (
	readVerbs  = "get list watch"
	writeVerbs = "create delete deletecollection patch update"
	allVerbs   = readVerbs + " " + writeVerbs
)

// viewRules returns the rules of the role "view". They cover neither Secrets nor roles.
func viewRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		rule(readVerbs, "", "bindings configmaps endpoints events limitranges namespaces namespaces/status persistentvolumeclaims persistentvolumeclaims/status pods pods/log pods/status replicationcontrollers replicationcontrollers/scale replicationcontrollers/status resourcequotas resourcequotas/status serviceaccounts services services/status"),
		rule(readVerbs, "apps", "controllerrevisions daemonsets daemonsets/status deployments deployments/scale deployments/status replicasets replicasets/scale replicasets/status statefulsets statefulsets/scale statefulsets/status"),
		rule(readVerbs, "autoscaling", "horizontalpodautoscalers horizontalpodautoscalers/status"),
		rule(readVerbs, "batch", "cronjobs cronjobs/status jobs jobs/status"),
		rule(readVerbs, "discovery.k8s.io", "endpointslices"),
		rule(readVerbs, "networking.k8s.io", "ingresses ingresses/status networkpolicies"),
		rule(readVerbs, "policy", "poddisruptionbudgets poddisruptionbudgets/status"),
		rule(readVerbs, "resource.k8s.io", "resourceclaims resourceclaims/status resourceclaimtemplates"),
		rule(readVerbs, "scheduling.k8s.io", "podgroups podgroups/status workloads"),
	}
}

// editRules returns the rules of the role "edit".
func editRules() []rbacv1.PolicyRule { return append(beyondView(), viewRules()...) }

func beyondView() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		rule(readVerbs, "", "pods/attach pods/exec pods/portforward pods/proxy secrets services/proxy"),
		rule("impersonate", "", "serviceaccounts"),
		rule(writeVerbs, "", "pods pods/attach pods/exec pods/portforward pods/proxy"),
		rule("create", "", "pods/eviction serviceaccounts/token"),
		rule("get patch update", "", "pods/resize"),
		rule(writeVerbs, "", "configmaps events persistentvolumeclaims replicationcontrollers replicationcontrollers/scale secrets serviceaccounts services services/proxy"),
		rule(writeVerbs, "apps", "daemonsets deployments deployments/rollback deployments/scale replicasets replicasets/scale statefulsets statefulsets/scale"),
		rule(writeVerbs, "autoscaling", "horizontalpodautoscalers"),
		rule(writeVerbs, "batch", "cronjobs jobs"),
		rule(writeVerbs, "networking.k8s.io", "ingresses networkpolicies"),
		rule(writeVerbs, "policy", "poddisruptionbudgets"),
		rule(writeVerbs, "resource.k8s.io", "resourceclaims resourceclaimtemplates"),
		rule(writeVerbs, "scheduling.k8s.io", "podgroups workloads"),
		rule(allVerbs, "coordination.k8s.io", "leases"),
	}
}

// adminRules returns the rules of the role "admin": the rules of "edit", and granting access in the
// namespace.
func adminRules() []rbacv1.PolicyRule { return append(beyondEdit(), editRules()...) }

func beyondEdit() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		rule("create", "authorization.k8s.io", "localsubjectaccessreviews"),
		rule(allVerbs, "rbac.authorization.k8s.io", "roles rolebindings"),
	}
}

// aggregateTo is a label prefix. A role with the label aggregateTo+NAME contributes its rules to
// the aggregated role NAME.
const aggregateTo = "rbac.authorization.k8s.io/aggregate-to-"

// Aggregated maps each aggregated default role to the role that contains its default rules.
var Aggregated = map[string]string{
	"admin": "system:aggregate-to-admin", "edit": "system:aggregate-to-edit", "view": "system:aggregate-to-view",
}

// namespaceRoles returns the roles "view", "edit" and "admin". Each aggregates the roles with its
// label, so that CRDs can add rules. They contain the default rules from the start, before the
// aggregation controller has run.
func namespaceRoles() []api.Object {
	var out []api.Object
	for _, r := range []struct {
		name, within string // the role within also aggregates the role name
		own, all     []rbacv1.PolicyRule
	}{
		{"view", "edit", viewRules(), viewRules()},
		{"edit", "admin", beyondView(), editRules()},
		{"admin", "", beyondEdit(), adminRules()},
	} {
		part, whole := bootstrapMeta(Aggregated[r.name]), bootstrapMeta(r.name)
		part.Labels[aggregateTo+r.name] = "true"
		if r.within != "" {
			whole.Labels[aggregateTo+r.within] = "true"
		}
		out = append(out, &rbacv1.ClusterRole{ObjectMeta: part, Rules: r.own}, &rbacv1.ClusterRole{
			ObjectMeta: whole, Rules: r.all,
			AggregationRule: &rbacv1.AggregationRule{ClusterRoleSelectors: []metav1.LabelSelector{
				{MatchLabels: map[string]string{aggregateTo + r.name: "true"}},
			}},
		})
	}
	return append(out, metricsReader())
}

// metricsReader returns a role that adds the reading of pod and node metrics to "view", "edit" and
// "admin".
func metricsReader() *rbacv1.ClusterRole {
	meta := bootstrapMeta("system:aggregated-metrics-reader")
	for whole := range Aggregated {
		meta.Labels[aggregateTo+whole] = "true"
	}
	return &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{rule(readVerbs, "metrics.k8s.io", "pods nodes")}}
}

func discoveryRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{paths("get", "/healthz", "/livez", "/readyz", "/version", "/version/", "/api", "/api/*", "/apis", "/apis/*", "/openapi", "/openapi/*")}
}

// schedulerRules returns the rules of the scheduler: reading its inputs, binding, preempting and
// reporting the results.
func schedulerRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		rule("create patch update", "core events.k8s.io", "events"),
		rule(readVerbs, "", "nodes namespaces services replicationcontrollers persistentvolumes"),
		rule(readVerbs+" delete patch", "", "pods"),
		rule("create", "", "bindings pods/binding pods/eviction"),
		rule("patch update", "", "pods/status"),
		rule(readVerbs+" patch update", "", "persistentvolumeclaims"),
		rule("patch update", "", "persistentvolumes"),
		rule(readVerbs, "apps", "replicasets statefulsets"),
		rule(readVerbs, "policy", "poddisruptionbudgets"),
		rule(readVerbs, "scheduling.k8s.io", "podgroups priorityclasses"),
		rule("patch update", "scheduling.k8s.io", "podgroups/status"),
		rule(readVerbs, "storage.k8s.io", "csinodes csidrivers storageclasses csistoragecapacities volumeattachments"),
		rule(readVerbs+" patch update", "resource.k8s.io", "resourceclaims"),
		rule("patch update", "resource.k8s.io", "resourceclaims/status"),
		rule(readVerbs, "resource.k8s.io", "deviceclasses resourceslices"),
		rule("create get update patch", "coordination.k8s.io", "leases"),
	}
}

// controllerRules returns the rules of the controllers. Garbage collection and namespace deletion
// concern every kind, so reading and deleting are granted on all resources.
func controllerRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		rule("get list watch delete deletecollection patch update", "*", "*"),
		rule("create", "", "events pods pods/binding pods/eviction configmaps endpoints namespaces nodes persistentvolumes persistentvolumeclaims secrets serviceaccounts serviceaccounts/token services"),
		rule("create", "events.k8s.io", "events"),
		rule("create", "apps", "replicasets controllerrevisions daemonsets deployments statefulsets"),
		rule("create", "batch", "jobs"),
		rule("create", "discovery.k8s.io", "endpointslices"),
		rule("create", "coordination.k8s.io", "leases"),
		rule("create", "storage.k8s.io", "volumeattachments csinodes csistoragecapacities"),
		rule("create", "resource.k8s.io", "resourceclaims"),
		rule("create", "snapshot.storage.k8s.io", "volumesnapshots volumesnapshotcontents"),
		rule("create", "groupsnapshot.storage.k8s.io", "volumegroupsnapshots volumegroupsnapshotcontents"),
		rule("create", "", "endpoints/restricted"),
		rule("create", "discovery.k8s.io", "endpointslices/restricted"),
		rule("create", "policy", "poddisruptionbudgets"),
		rule("create", "networking.k8s.io", "servicecidrs ipaddresses"),
		rule("create", "authentication.k8s.io", "tokenreviews"),
		rule("create", "authorization.k8s.io", "subjectaccessreviews"),
		rule("escalate", rbacv1.GroupName, "clusterroles"), // the aggregation controller writes rules into roles
		rule("approve", "certificates.k8s.io", "signers", "kubernetes.io/kube-apiserver-client-kubelet"),
		rule("sign", "certificates.k8s.io", "signers", builtinSigners...),
	}
}

// builtinSigners are the certificate signers that the cluster itself operates.
var builtinSigners = []string{
	"kubernetes.io/kube-apiserver-client", "kubernetes.io/kube-apiserver-client-kubelet", "kubernetes.io/kubelet-serving",
}

// certificateRoles returns roles for approvers of certificates, and for nodes with automatically
// approved certificate requests. No default binding grants these roles; an administrator has to.
func certificateRoles() []api.Object {
	const prefix = "system:certificates.k8s.io:"
	var out []api.Object
	for _, part := range []string{"nodeclient", "selfnodeclient"} {
		out = append(out, &rbacv1.ClusterRole{ObjectMeta: bootstrapMeta(prefix + "certificatesigningrequests:" + part),
			Rules: []rbacv1.PolicyRule{rule("create", "certificates.k8s.io", "certificatesigningrequests/"+part)}})
	}
	for _, signer := range builtinSigners {
		_, name, _ := strings.Cut(signer, "/")
		out = append(out, &rbacv1.ClusterRole{ObjectMeta: bootstrapMeta(prefix + name + "-approver"),
			Rules: []rbacv1.PolicyRule{rule("approve", "certificates.k8s.io", "signers", signer)}})
	}
	return out
}

// BootstrapObjects returns the default roles and bindings of every cluster.
func BootstrapObjects() []api.Object {
	var out []api.Object
	role := func(name string, rules ...rbacv1.PolicyRule) {
		out = append(out, &rbacv1.ClusterRole{ObjectMeta: bootstrapMeta(name), Rules: rules})
	}
	bind := func(name, role string, subjects ...rbacv1.Subject) {
		out = append(out, &rbacv1.ClusterRoleBinding{
			ObjectMeta: bootstrapMeta(name),
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   subjects,
		})
	}
	role("cluster-admin", rule("*", "*", "*"), paths("*", "*"))
	bind("cluster-admin", "cluster-admin", group(api.GroupMasters))
	out = append(out, namespaceRoles()...)
	out = append(out, certificateRoles()...)
	role("system:discovery", discoveryRules()...)
	bind("system:discovery", "system:discovery", group(api.GroupAuthenticated))
	role("system:basic-user",
		rule("create", "authorization.k8s.io", "selfsubjectaccessreviews selfsubjectrulesreviews"),
		rule("create", "authentication.k8s.io", "selfsubjectreviews"))
	bind("system:basic-user", "system:basic-user", group(api.GroupAuthenticated))
	role("system:public-info-viewer", paths("get", "/healthz", "/livez", "/readyz", "/version", "/version/"))
	bind("system:public-info-viewer", "system:public-info-viewer", group(api.GroupAuthenticated), group(api.GroupUnauthenticated))
	role("system:monitoring", paths("get", "/metrics", "/metrics/slis", "/livez", "/readyz", "/healthz", "/livez/*", "/readyz/*", "/healthz/*"))
	bind("system:monitoring", "system:monitoring", group("system:monitoring"))
	role("system:node", nodeRules...)
	role("system:auth-delegator",
		rule("create", "authentication.k8s.io", "tokenreviews"),
		rule("create", "authorization.k8s.io", "subjectaccessreviews"))
	role("system:kube-scheduler", schedulerRules()...)
	bind("system:kube-scheduler", "system:kube-scheduler", user(api.UserScheduler))
	role("system:kube-controller-manager", controllerRules()...)
	bind("system:kube-controller-manager", "system:kube-controller-manager", user(api.UserController))
	role("system:service-account-issuer-discovery", paths("get", "/.well-known/openid-configuration", "/openid/v1/jwks", "/openid/v1/jwks/"))
	bind("system:service-account-issuer-discovery", "system:service-account-issuer-discovery", group(api.GroupServiceAccounts))
	role("keelson:gateway-proxy", rule("get list watch", "gateway.networking.k8s.io", "gatewayclasses gateways httproutes grpcroutes referencegrants"),
		rule("get list watch", "", "services namespaces"), rule("get list watch", "discovery.k8s.io", "endpointslices"))
	bind("keelson:gateway-proxy", "keelson:gateway-proxy", group(api.GroupServiceAccounts+":keelson-entry"))
	role("keelson:ingress-proxy", rule("get list watch", "networking.k8s.io", "ingresses"), rule("get list watch", "", "services"), rule("get list watch", "discovery.k8s.io", "endpointslices"))
	bind("keelson:ingress-proxy", "keelson:ingress-proxy", rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: "keelson-entry", Name: "entry"})
	role("keelson:timeline", paths("get", "/timeline/*"))
	return out
}

// Retired are default roles of earlier releases with permissions that are no longer needed. Their
// bindings have the same names. Reconciling default roles only adds rules, so a role with fewer
// rules needs a new name.
var Retired = []string{"keelson:entry"} // granted reading every Secret

func bootstrapMeta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name:        name,
		Labels:      map[string]string{"kubernetes.io/bootstrapping": "rbac-defaults"},
		Annotations: map[string]string{"rbac.authorization.kubernetes.io/autoupdate": "true"},
	}
}

func group(name string) rbacv1.Subject {
	return rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: name}
}

func user(name string) rbacv1.Subject {
	return rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}
}
