package authz

import (
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// newRule returns a rule that grants verbs on resources. verbs, groups and resources are lists
// separated by spaces. Empty groups mean the core group; in a list, it is "core".
func newRule(verbs, groups, resources string, names ...string) rbacv1.PolicyRule {
	g := strings.Fields(groups)
	for i := range g {
		if g[i] == "core" {
			g[i] = ""
		}
	}
	if len(g) == 0 {
		g = []string{""}
	}
	return rbacv1.PolicyRule{Verbs: strings.Fields(verbs), APIGroups: g, Resources: strings.Fields(resources),
		ResourceNames: names}
}

func pathRule(verbs string, urls ...string) rbacv1.PolicyRule {
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
		newRule(readVerbs, "", "bindings configmaps endpoints events limitranges namespaces namespaces/status "+
			"persistentvolumeclaims persistentvolumeclaims/status pods pods/log pods/status replicationcontrollers "+
			"replicationcontrollers/scale replicationcontrollers/status resourcequotas resourcequotas/status "+
			"serviceaccounts services services/status"),
		newRule(readVerbs, "apps", "controllerrevisions daemonsets daemonsets/status deployments deployments/scale "+
			"deployments/status replicasets replicasets/scale replicasets/status statefulsets statefulsets/scale "+
			"statefulsets/status"),
		newRule(readVerbs, "autoscaling", "horizontalpodautoscalers horizontalpodautoscalers/status"),
		newRule(readVerbs, "batch", "cronjobs cronjobs/status jobs jobs/status"),
		newRule(readVerbs, "discovery.k8s.io", "endpointslices"),
		newRule(readVerbs, "networking.k8s.io", "ingresses ingresses/status networkpolicies"),
		newRule(readVerbs, "policy", "poddisruptionbudgets poddisruptionbudgets/status"),
		newRule(readVerbs, "resource.k8s.io", "resourceclaims resourceclaims/status resourceclaimtemplates"),
		newRule(readVerbs, "scheduling.k8s.io", "podgroups podgroups/status workloads"),
	}
}

// editRules returns the rules of the role "edit".
func editRules() []rbacv1.PolicyRule { return append(beyondView(), viewRules()...) }

func beyondView() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		newRule(readVerbs, "", "pods/attach pods/exec pods/portforward pods/proxy secrets services/proxy"),
		newRule("impersonate", "", "serviceaccounts"),
		newRule(writeVerbs, "", "pods pods/attach pods/exec pods/portforward pods/proxy"),
		newRule("create", "", "pods/eviction serviceaccounts/token"),
		newRule("get patch update", "", "pods/resize"),
		newRule(writeVerbs, "", "configmaps events persistentvolumeclaims replicationcontrollers "+
			"replicationcontrollers/scale secrets serviceaccounts services services/proxy"),
		newRule(writeVerbs, "apps", "daemonsets deployments deployments/rollback deployments/scale replicasets "+
			"replicasets/scale statefulsets statefulsets/scale"),
		newRule(writeVerbs, "autoscaling", "horizontalpodautoscalers"),
		newRule(writeVerbs, "batch", "cronjobs jobs"),
		newRule(writeVerbs, "networking.k8s.io", "ingresses networkpolicies"),
		newRule(writeVerbs, "policy", "poddisruptionbudgets"),
		newRule(writeVerbs, "resource.k8s.io", "resourceclaims resourceclaimtemplates"),
		newRule(writeVerbs, "scheduling.k8s.io", "podgroups workloads"),
		newRule(allVerbs, "coordination.k8s.io", "leases"),
	}
}

// adminRules returns the rules of the role "admin": the rules of "edit", and granting access in the
// namespace.
func adminRules() []rbacv1.PolicyRule { return append(beyondEdit(), editRules()...) }

func beyondEdit() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		newRule("create", "authorization.k8s.io", "localsubjectaccessreviews"),
		newRule(allVerbs, "rbac.authorization.k8s.io", "roles rolebindings"),
	}
}

// aggregateTo is a label prefix. The rules of a role with the label aggregateTo+NAME are added to
// the aggregated role NAME.
const aggregateTo = "rbac.authorization.k8s.io/aggregate-to-"

// Aggregated maps each aggregated default role to the role that contains its default rules.
var Aggregated = map[string]string{
	"admin": "system:aggregate-to-admin", "edit": "system:aggregate-to-edit", "view": "system:aggregate-to-view",
}

// namespaceRoles returns the roles "view", "edit" and "admin". Each aggregates the roles with its
// label, so that CRDs can add rules. The roles contain the default rules from the start, before the
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

// metricsReader returns a role that aggregation adds to "view", "edit" and "admin". It allows
// reading the metrics of pods and nodes.
func metricsReader() *rbacv1.ClusterRole {
	meta := bootstrapMeta("system:aggregated-metrics-reader")
	for whole := range Aggregated {
		meta.Labels[aggregateTo+whole] = "true"
	}
	return &rbacv1.ClusterRole{ObjectMeta: meta,
		Rules: []rbacv1.PolicyRule{newRule(readVerbs, "metrics.k8s.io", "pods nodes")}}
}

func discoveryRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{pathRule("get", "/healthz", "/livez", "/readyz", "/version", "/version/", "/api",
		"/api/*", "/apis", "/apis/*", "/openapi", "/openapi/*")}
}

// schedulerRules returns the rules of the scheduler: reading its inputs, binding, preempting and
// reporting the results.
func schedulerRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		newRule("create patch update", "core events.k8s.io", "events"),
		newRule(readVerbs, "", "nodes namespaces services replicationcontrollers persistentvolumes"),
		newRule(readVerbs+" delete patch", "", "pods"),
		newRule("create", "", "bindings pods/binding pods/eviction"),
		newRule("patch update", "", "pods/status"),
		newRule(readVerbs+" patch update", "", "persistentvolumeclaims"),
		newRule("patch update", "", "persistentvolumes"),
		newRule(readVerbs, "apps", "replicasets statefulsets"),
		newRule(readVerbs, "policy", "poddisruptionbudgets"),
		newRule(readVerbs, "scheduling.k8s.io", "podgroups priorityclasses"),
		newRule("patch update", "scheduling.k8s.io", "podgroups/status"),
		newRule(readVerbs, "storage.k8s.io",
			"csinodes csidrivers storageclasses csistoragecapacities volumeattachments"),
		newRule(readVerbs+" patch update", "resource.k8s.io", "resourceclaims"),
		newRule("patch update", "resource.k8s.io", "resourceclaims/status"),
		newRule(readVerbs, "resource.k8s.io", "deviceclasses resourceslices"),
		newRule("create get update patch", "coordination.k8s.io", "leases"),
	}
}

// controllerRules returns the rules of the controllers. Garbage collection and namespace deletion
// concern every kind, so reading and deleting are granted on all resources.
func controllerRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		newRule("get list watch delete deletecollection patch update", "*", "*"),
		newRule("create", "", "events pods pods/binding pods/eviction configmaps endpoints namespaces nodes "+
			"persistentvolumes persistentvolumeclaims secrets serviceaccounts serviceaccounts/token services"),
		newRule("create", "events.k8s.io", "events"),
		newRule("create", "apps", "replicasets controllerrevisions daemonsets deployments statefulsets"),
		newRule("create", "batch", "jobs"),
		newRule("create", "discovery.k8s.io", "endpointslices"),
		newRule("create", "coordination.k8s.io", "leases"),
		newRule("create", "storage.k8s.io", "volumeattachments csinodes csistoragecapacities"),
		newRule("create", "resource.k8s.io", "resourceclaims"),
		newRule("create", "snapshot.storage.k8s.io", "volumesnapshots volumesnapshotcontents"),
		newRule("create", "groupsnapshot.storage.k8s.io", "volumegroupsnapshots volumegroupsnapshotcontents"),
		newRule("create", "", "endpoints/restricted"),
		newRule("create", "discovery.k8s.io", "endpointslices/restricted"),
		newRule("create", "policy", "poddisruptionbudgets"),
		newRule("create", "networking.k8s.io", "servicecidrs ipaddresses"),
		newRule("create", "authentication.k8s.io", "tokenreviews"),
		newRule("create", "authorization.k8s.io", "subjectaccessreviews"),
		newRule("escalate", rbacv1.GroupName, "clusterroles"), // the aggregation controller writes rules into roles
		newRule("approve", "certificates.k8s.io", "signers", "kubernetes.io/kube-apiserver-client-kubelet"),
		newRule("sign", "certificates.k8s.io", "signers", builtinSigners...),
	}
}

// builtinSigners are the certificate signers that the cluster itself operates.
var builtinSigners = []string{
	"kubernetes.io/kube-apiserver-client", "kubernetes.io/kube-apiserver-client-kubelet",
	"kubernetes.io/kubelet-serving",
}

// certificateRoles returns the roles for approvers of certificate requests, and for nodes with
// certificate requests that are approved automatically. No default binding grants these roles; an
// administrator has to.
func certificateRoles() []api.Object {
	const prefix = "system:certificates.k8s.io:"
	var out []api.Object
	for _, part := range []string{"nodeclient", "selfnodeclient"} {
		out = append(out, &rbacv1.ClusterRole{ObjectMeta: bootstrapMeta(prefix + "certificatesigningrequests:" + part),
			Rules: []rbacv1.PolicyRule{newRule("create", "certificates.k8s.io", "certificatesigningrequests/"+part)}})
	}
	for _, signer := range builtinSigners {
		_, name, _ := strings.Cut(signer, "/")
		out = append(out, &rbacv1.ClusterRole{ObjectMeta: bootstrapMeta(prefix + name + "-approver"),
			Rules: []rbacv1.PolicyRule{newRule("approve", "certificates.k8s.io", "signers", signer)}})
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
	role("cluster-admin", newRule("*", "*", "*"), pathRule("*", "*"))
	bind("cluster-admin", "cluster-admin", groupSubject(api.GroupMasters))
	out = append(out, namespaceRoles()...)
	out = append(out, certificateRoles()...)
	role("system:discovery", discoveryRules()...)
	bind("system:discovery", "system:discovery", groupSubject(api.GroupAuthenticated))
	role("system:basic-user",
		newRule("create", "authorization.k8s.io", "selfsubjectaccessreviews selfsubjectrulesreviews"),
		newRule("create", "authentication.k8s.io", "selfsubjectreviews"))
	bind("system:basic-user", "system:basic-user", groupSubject(api.GroupAuthenticated))
	role("system:public-info-viewer", pathRule("get", "/healthz", "/livez", "/readyz", "/version", "/version/"))
	bind("system:public-info-viewer", "system:public-info-viewer", groupSubject(api.GroupAuthenticated),
		groupSubject(api.GroupUnauthenticated))
	role("system:monitoring", pathRule("get", "/metrics", "/metrics/slis", "/livez", "/readyz", "/healthz", "/livez/*",
		"/readyz/*", "/healthz/*"))
	bind("system:monitoring", "system:monitoring", groupSubject("system:monitoring"))
	role("system:node", nodeRules...)
	role("system:auth-delegator",
		newRule("create", "authentication.k8s.io", "tokenreviews"),
		newRule("create", "authorization.k8s.io", "subjectaccessreviews"))
	role("system:kube-scheduler", schedulerRules()...)
	bind("system:kube-scheduler", "system:kube-scheduler", userSubject(api.UserScheduler))
	role("system:kube-controller-manager", controllerRules()...)
	bind("system:kube-controller-manager", "system:kube-controller-manager", userSubject(api.UserController))
	role("system:service-account-issuer-discovery",
		pathRule("get", "/.well-known/openid-configuration", "/openid/v1/jwks", "/openid/v1/jwks/"))
	bind("system:service-account-issuer-discovery", "system:service-account-issuer-discovery",
		groupSubject(api.GroupServiceAccounts))
	role("keelson:gateway-proxy", newRule("get list watch", "gateway.networking.k8s.io",
		"gatewayclasses gateways httproutes grpcroutes referencegrants"),
		newRule("get list watch", "", "services namespaces"),
		newRule("get list watch", "discovery.k8s.io", "endpointslices"))
	bind("keelson:gateway-proxy", "keelson:gateway-proxy", groupSubject(api.GroupServiceAccounts+":keelson-entry"))
	role("keelson:ingress-proxy", newRule("get list watch", "networking.k8s.io", "ingresses"),
		newRule("get list watch", "", "services"), newRule("get list watch", "discovery.k8s.io", "endpointslices"))
	bind("keelson:ingress-proxy", "keelson:ingress-proxy",
		rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: "keelson-entry", Name: "entry"})
	role("keelson:timeline", pathRule("get", "/timeline/*"))
	return out
}

// Retired are the names of default roles of earlier releases, and of their bindings. The
// permissions of these roles are no longer needed. Reconciling default roles only adds rules.
// Therefore a role that loses rules needs a new name.
var Retired = []string{"keelson:entry"} // granted reading every Secret

func bootstrapMeta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name:        name,
		Labels:      map[string]string{"kubernetes.io/bootstrapping": "rbac-defaults"},
		Annotations: map[string]string{"rbac.authorization.kubernetes.io/autoupdate": "true"},
	}
}

func groupSubject(name string) rbacv1.Subject {
	return rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: name}
}

func userSubject(name string) rbacv1.Subject {
	return rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}
}
