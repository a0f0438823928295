package kinds

import (
	"crypto/tls"
	"fmt"
	"reflect"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
)

// ObjectWarnings returns the warnings that Kubernetes returns about a valid object. old is the
// stored object, nil on create.
func ObjectWarnings(obj, old api.Object) []string {
	switch o := obj.(type) {
	case *corev1.Pod, *corev1.PodTemplate, *corev1.ReplicationController, *appsv1.Deployment, *appsv1.ReplicaSet,
		*appsv1.StatefulSet,
		*appsv1.DaemonSet, *batchv1.Job, *batchv1.CronJob:
		return workloadWarnings(obj, old)
	case *corev1.Service:
		return serviceWarnings(o)
	case *corev1.Endpoints, *discoveryv1.EndpointSlice, *networkingv1.NetworkPolicy, *networkingv1.Ingress:
		return networkWarnings(obj, old)
	case *corev1.PersistentVolume, *corev1.PersistentVolumeClaim, *storagev1.StorageClass,
		*storagev1.CSIStorageCapacity, *storagev1.CSIDriver:
		return storageWarnings(obj, old)
	case *corev1.Node:
		return nodeWarnings(o)
	case *corev1.ResourceQuota:
		if old == nil {
			return quotaWarnings(o)
		}
	case *corev1.Secret:
		if o.Type == corev1.SecretTypeTLS {
			if _, err := tls.X509KeyPair(o.Data[corev1.TLSCertKey], o.Data[corev1.TLSPrivateKeyKey]); err != nil {
				return []string{err.Error()}
			}
		}
	case *nodev1.RuntimeClass:
		return runtimeClassWarnings(o)
	case *resourcev1.ResourceSlice:
		if o.Spec.Driver != strings.ToLower(o.Spec.Driver) {
			return []string{fmt.Sprintf("spec.driver: driver names should be lowercase; %q contains uppercase "+
				"characters", o.Spec.Driver)}
		}
	case *admissionv1.ValidatingWebhookConfiguration, *admissionv1.MutatingWebhookConfiguration,
		*admissionv1.ValidatingAdmissionPolicy,
		*admissionv1.ValidatingAdmissionPolicyBinding, *admissionv1.MutatingAdmissionPolicy,
		*admissionv1.MutatingAdmissionPolicyBinding:
		const suffix = ".static.k8s.io"
		if strings.HasSuffix(obj.GetName(), suffix) {
			return []string{fmt.Sprintf("metadata.name: names ending with %q are reserved for static "+
				"manifest-based configurations"+
				" and cannot be managed via the API", suffix)}
		}
	}
	return nil
}

// NewObjectWarnings returns the warnings about a new object as the client sent it, before
// PrepareCreate.
func NewObjectWarnings(obj api.Object) []string {
	if p, is := obj.(*corev1.Pod); is {
		return podspec.AppArmorWarnings(p)
	}
	return nil
}

// isSpecChanged reports whether the specs of two objects of the same kind differ. For PodTemplates,
// it compares the templates.
func isSpecChanged(obj, old api.Object) bool {
	spec := func(o api.Object) any {
		v := reflect.ValueOf(o).Elem()
		if f := v.FieldByName("Spec"); f.IsValid() {
			return f.Interface()
		}
		return v.FieldByName("Template").Interface()
	}
	return !fieldrules.SemanticEqual(spec(obj), spec(old))
}

// workloadWarnings returns the warnings about pods and about kinds with a pod template. Templates
// are checked on create and when the spec has changed, pods only on create.
func workloadWarnings(obj, old api.Object) []string {
	var w podspec.Warnings
	spec := field.NewPath("spec")
	if old == nil {
		addPodNameWarning(&w, obj)
	}
	judged := old == nil || isSpecChanged(obj, old)
	addTemplateWarnings := func() {
		if t, fldPath := podspec.PodTemplateOf(obj); judged && t != nil {
			w = append(w, podspec.PodWarnings(&t.Spec, &t.ObjectMeta, fldPath)...)
		}
	}
	switch o := obj.(type) {
	case *corev1.Pod:
		if old == nil {
			w = append(w, podspec.PodWarnings(&o.Spec, &o.ObjectMeta, nil)...)
		}
	case *appsv1.StatefulSet:
		addTemplateWarnings()
		for i := range o.Spec.VolumeClaimTemplates {
			w.AddClaim(&o.Spec.VolumeClaimTemplates[i].Spec, spec.Child("volumeClaimTemplates").Index(i))
		}
		if ptr.Deref(o.Spec.RevisionHistoryLimit, 0) < 0 {
			w.Add(spec.Child("revisionHistoryLimit"),
				"a negative value retains all historical revisions; a value >= 0 is recommended")
		}
	case *batchv1.Job:
		addJobWarning(&w, &o.Spec, spec, judged)
		addTemplateWarnings()
	case *batchv1.CronJob:
		fldPath := spec.Child("jobTemplate", "spec")
		addJobWarning(&w, &o.Spec.JobTemplate.Spec, fldPath, judged)
		addTemplateWarnings()
		if old != nil && strings.Contains(o.Spec.Schedule, "TZ") {
			w = append(w, "cannot use TZ or CRON_TZ in spec.spec.schedule, use timeZone instead, see "+
				"https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/ for more details")
		}
	default:
		addTemplateWarnings()
	}
	return w
}

// addPodNameWarning adds a warning if pods derive their name or hostname from the object's name and
// that is not a DNS label.
func addPodNameWarning(w *podspec.Warnings, obj api.Object) {
	what := "Pod names and hostnames"
	switch obj.(type) {
	case *corev1.Pod:
		what = "the Pod's hostname"
	case *corev1.PodTemplate, *appsv1.StatefulSet, *appsv1.DaemonSet:
		return
	}
	if msgs := validation.IsDNS1123Label(obj.GetName()); len(msgs) > 0 {
		*w = append(*w,
			fmt.Sprintf("metadata.name: this is used in %s, which can result in surprising behavior; a DNS label "+
				"is recommended: %v",
				what, msgs))
	}
}

// addJobWarning adds a warning if a Job has more indexes than its status can represent. specChanged
// is true if the spec is new or changed.
func addJobWarning(w *podspec.Warnings, s *batchv1.JobSpec, fldPath *field.Path, specChanged bool) {
	if specChanged && ptr.Deref(s.CompletionMode, "") == batchv1.IndexedCompletion &&
		ptr.Deref(s.Completions, 0) > 100_000 && ptr.Deref(s.Parallelism, 0) > 10_000 {
		w.Add(fldPath, "In Indexed Jobs with a number of completions higher than 10^5 and a parallelism "+
			"higher than 10^4, "+
			"Kubernetes might not be able to track completedIndexes when a big number of indexes fail")
	}
}

func serviceWarnings(s *corev1.Service) []string {
	var w podspec.Warnings
	spec := field.NewPath("spec")
	if _, set := s.Annotations[corev1.DeprecatedAnnotationTopologyAwareHints]; set {
		w = append(w, fmt.Sprintf("annotation %s is deprecated, please use %s instead",
			corev1.DeprecatedAnnotationTopologyAwareHints, corev1.AnnotationTopologyMode))
	}
	if s.Spec.ClusterIP != "" && s.Spec.ClusterIP != corev1.ClusterIPNone {
		for i, ip := range s.Spec.ClusterIPs {
			w = append(w, validation.GetWarningsForIP(spec.Child("clusterIPs").Index(i), ip)...)
		}
	}
	if s.Spec.Type == corev1.ServiceTypeClusterIP && s.Spec.ClusterIP == corev1.ClusterIPNone {
		if s.Spec.LoadBalancerIP != "" {
			w = append(w, "spec.loadBalancerIP is ignored for headless services")
		}
		if len(s.Spec.ExternalIPs) > 0 {
			w = append(w, "spec.externalIPs is ignored for headless services")
		}
		if s.Spec.SessionAffinity != corev1.ServiceAffinityNone {
			w = append(w, "spec.SessionAffinity is ignored for headless services")
		}
	}
	for i, ip := range s.Spec.ExternalIPs {
		w = append(w, validation.GetWarningsForIP(spec.Child("externalIPs").Index(i), ip)...)
	}
	if s.Spec.LoadBalancerIP != "" {
		w = append(w, validation.GetWarningsForIP(spec.Child("loadBalancerIP"), s.Spec.LoadBalancerIP)...)
	}
	for i, cidr := range s.Spec.LoadBalancerSourceRanges {
		w = append(w, validation.GetWarningsForCIDR(spec.Child("loadBalancerSourceRanges").Index(i), cidr)...)
	}
	external := s.Spec.Type == corev1.ServiceTypeExternalName
	if external && len(s.Spec.ExternalIPs) > 0 {
		w = append(w, fmt.Sprintf("spec.externalIPs is ignored when spec.type is %q", corev1.ServiceTypeExternalName))
	}
	if !external && s.Spec.ExternalName != "" {
		w = append(w, fmt.Sprintf("spec.externalName is ignored when spec.type is not %q",
			corev1.ServiceTypeExternalName))
	}
	if ptr.Deref(s.Spec.TrafficDistribution, "") == corev1.ServiceTrafficDistributionPreferClose {
		w = append(w, fmt.Sprintf("spec.trafficDistribution: %q is deprecated; use %q",
			corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone))
	}
	return w
}

func networkWarnings(obj, old api.Object) []string {
	var w podspec.Warnings
	switch o := obj.(type) {
	case *corev1.Endpoints:
		for i, s := range o.Subsets {
			for j, a := range s.Addresses {
				w = append(w,
					validation.GetWarningsForIP(field.NewPath("subsets").Index(i).Child("addresses").Index(j).Child(
						"ip"), a.IP)...)
			}
			for j, a := range s.NotReadyAddresses {
				w = append(w,
					validation.GetWarningsForIP(field.NewPath("subsets").Index(i).Child("notReadyAddresses").Index(j).
						Child("ip"), a.IP)...)
			}
		}
	case *discoveryv1.EndpointSlice:
		if old == nil && o.AddressType == discoveryv1.AddressTypeFQDN {
			w = append(w, "spec.addressType: FQDN endpoints are deprecated")
		}
		for i := range o.Endpoints {
			if o.AddressType == discoveryv1.AddressTypeFQDN {
				break
			}
			for j, a := range o.Endpoints[i].Addresses {
				w = append(w,
					validation.GetWarningsForIP(field.NewPath("endpoints").Index(i).Child("addresses").Index(j), a)...)
			}
		}
	case *networkingv1.NetworkPolicy:
		peers := func(peers []networkingv1.NetworkPolicyPeer, fldPath *field.Path) {
			for i := range peers {
				if b, here := peers[i].IPBlock, fldPath.Index(i).Child("ipBlock"); b != nil {
					w = append(w, validation.GetWarningsForCIDR(here.Child("cidr"), b.CIDR)...)
					for j, e := range b.Except {
						w = append(w, validation.GetWarningsForCIDR(here.Child("except").Index(j), e)...)
					}
				}
			}
		}
		for i := range o.Spec.Ingress {
			peers(o.Spec.Ingress[i].From, field.NewPath("spec", "ingress").Index(i).Child("from"))
		}
		for i := range o.Spec.Egress {
			peers(o.Spec.Egress[i].To, field.NewPath("spec", "egress").Index(i).Child("to"))
		}
	case *networkingv1.Ingress:
		if _, set := o.Annotations[networking.IngressClassAnnotation]; set && old == nil &&
			o.Spec.IngressClassName == nil {
			w = append(w, fmt.Sprintf("annotation %q is deprecated, please use 'spec.ingressClassName' instead",
				networking.IngressClassAnnotation))
		}
	}
	return w
}

func storageWarnings(obj, old api.Object) []string {
	var w podspec.Warnings
	class := func(fldPath *field.Path) {
		if _, set := obj.GetAnnotations()[corev1.BetaStorageClassAnnotation]; set {
			w.Add(fldPath.Key(corev1.BetaStorageClassAnnotation),
				`deprecated since v1.8; use "storageClassName" attribute instead`)
		}
	}
	annotations := field.NewPath("metadata", "annotations")
	switch o := obj.(type) {
	case *corev1.PersistentVolume:
		class(annotations)
		if _, set := o.Annotations[corev1.MountOptionAnnotation]; set {
			w.Add(annotations.Key(corev1.MountOptionAnnotation),
				`deprecated since v1.31; use "mountOptions" attribute instead`)
		}
		if o.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRecycle {
			w.Add(field.NewPath("spec", "persistentVolumeReclaimPolicy"), "The Recycle reclaim policy is deprecated. "+
				"Instead, the recommended approach is to use dynamic provisioning.")
		}
		if a := o.Spec.NodeAffinity; a != nil && a.Required != nil {
			for i := range a.Required.NodeSelectorTerms {
				w.AddNodeTerm(&a.Required.NodeSelectorTerms[i], false,
					field.NewPath("spec", "nodeAffinity", "required", "nodeSelectorTerms").Index(i))
			}
		}
	case *corev1.PersistentVolumeClaim:
		class(annotations)
		w.AddClaim(&o.Spec, field.NewPath("spec"))
	case *storagev1.StorageClass:
		for i, t := range o.AllowedTopologies {
			for j, e := range t.MatchLabelExpressions {
				if why := podspec.DeprecatedNodeLabels[e.Key]; why != "" {
					w.Add(field.NewPath("allowedTopologies").Index(i).Child("matchLabelExpressions").Index(j).Child(
						"key"), "%s", why)
				}
			}
		}
	case *storagev1.CSIStorageCapacity:
		if o.NodeTopology == nil {
			break
		}
		fldPath := field.NewPath("nodeTopology")
		for i, e := range o.NodeTopology.MatchExpressions {
			if why := podspec.DeprecatedNodeLabels[e.Key]; why != "" {
				w.Add(fldPath.Child("matchExpressions").Index(i).Child("key"), "%s is %s", e.Key, why)
			}
		}
		for _, key := range fieldrules.SortedKeys(o.NodeTopology.MatchLabels) {
			if why := podspec.DeprecatedNodeLabels[key]; why != "" {
				w.Add(fldPath.Child("matchLabels").Child(key), "%s", why)
			}
		}
	case *storagev1.CSIDriver:
		before, _ := old.(*storagev1.CSIDriver)
		if len(o.Spec.TokenRequests) > 0 && o.Spec.ServiceAccountTokenInSecrets == nil &&
			(before == nil || !fieldrules.SemanticEqual(before.Spec.TokenRequests, o.Spec.TokenRequests)) {
			w = append(w, "spec.serviceAccountTokenInSecrets is unset; if supported by this CSI driver, "+
				"set to true to prevent possible logging of tokens in volume attributes")
		}
	}
	return w
}

func nodeWarnings(n *corev1.Node) []string {
	var w podspec.Warnings
	if n.Spec.ConfigSource != nil {
		w = append(w, "spec.configSource: the feature is removed")
	}
	if n.Spec.DoNotUseExternalID != "" {
		w = append(w, "spec.externalID: this field is deprecated, and is unused by Kubernetes")
	}
	for i, cidr := range n.Spec.PodCIDRs {
		w = append(w, validation.GetWarningsForCIDR(field.NewPath("spec", "podCIDRs").Index(i), cidr)...)
	}
	return w
}

func quotaWarnings(q *corev1.ResourceQuota) []string {
	var w podspec.Warnings
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceStorage,
		corev1.ResourceEphemeralStorage} {
		requests, limits := "requests."+name, "limits."+name
		request, requested := q.Spec.Hard[requests]
		if !requested && (name == corev1.ResourceCPU || name == corev1.ResourceMemory) {
			if request, requested = q.Spec.Hard[name]; requested {
				requests = name
			}
		}
		if limit, limited := q.Spec.Hard[limits]; requested && limited && request.Cmp(limit) > 0 {
			w = append(w, fmt.Sprintf("ResourceQuota %s (%s) should be less than %s (%s)", requests, request.String(),
				limits, limit.String()))
		}
	}
	return w
}

func runtimeClassWarnings(c *nodev1.RuntimeClass) []string {
	var w podspec.Warnings
	if c.Scheduling == nil {
		return nil
	}
	for _, key := range fieldrules.SortedKeys(c.Scheduling.NodeSelector) {
		if why := podspec.DeprecatedNodeLabels[key]; why != "" {
			w.Add(field.NewPath("scheduling", "nodeSelector"), "%s", why)
		}
	}
	return w
}
