// Package why explains why an API object is not healthy, and returns commands that repair it. It
// does no I/O: the caller reads the objects. The report lists the objects that could not be read.
package why

import (
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// Finding is one problem of an API object, with its reason and commands that repair it.
type Finding struct {
	Object  string       `json:"object"` // kind and name, such as "pod default/web-0"
	What    string       `json:"what"`
	Since   *metav1.Time `json:"since,omitempty"` // when the problem began; nil if not known
	Because string       `json:"because,omitempty"`
	Mend    []string     `json:"mend,omitempty"` // commands that repair the problem, in order
	Details []string     `json:"details,omitempty"`
}

// Report contains all Findings about one API object. An empty list means that no problem was found.
type Report struct {
	Object   string    `json:"object"`
	Well     string    `json:"well,omitempty"` // state of a healthy object
	Findings []Finding `json:"findings"`
	Unread   []string  `json:"unread,omitempty"` // lists that could not be read
}

// World contains the objects that the caller read to explain one object, the subject. If Unread
// contains the name of a list, that list could not be read, and its content is not known.
type World struct {
	Now    time.Time
	Unread []string

	Events []corev1.Event // events of the subject and of its pods
	Nodes  []corev1.Node
	Pods   []corev1.Pod // pods in the subject's namespace
	Placed []corev1.Pod // pods in all namespaces
	Claims []corev1.PersistentVolumeClaim

	Budgets     []policyv1.PodDisruptionBudget // PodDisruptionBudgets of all namespaces, if the subject is a node
	StatefulSet *appsv1.StatefulSet            // controller of the subject, if the subject is a pod; nil if not found

	Attachments []storagev1.VolumeAttachment // attachments of the claim's volume, if the subject is a claim

	ReplicaSets []appsv1.ReplicaSet

	Group GroupObjects // only set if the subject is a pod
	Route RouteObjects // only set if the subject is a Service, an EndpointSlice, or an Ingress
	Scale ScaleObjects // only set if the subject is a HorizontalPodAutoscaler
}

// GroupObjects contains the objects that explain why a pod, or its PodGroup, is not scheduled.
type GroupObjects struct {
	Groups     []schedulingv1beta1.PodGroup // PodGroups in the subject's namespace
	Mates      []corev1.Pod                 // pods in the subject's namespace, if the subject is in a PodGroup
	Schedulers []string                     // names that the cluster's scheduler serves; empty if not known
}

// RouteObjects contains the objects through which requests reach the pods of a Service.
type RouteObjects struct {
	Slices   []discoveryv1.EndpointSlice // EndpointSlices of the Service
	Services []corev1.Service            // Services to which the subject refers, if it is an EndpointSlice or Ingress
	Secrets  []corev1.Secret             // Secrets to which the subject refers, if it is an Ingress
	Classes  []networkingv1.IngressClass
}

// ScaleObjects contains the target of an autoscaler, and the state of its metrics.
type ScaleObjects struct {
	Scaled   *Scaled  // the object that the autoscaler scales; nil if not known
	Measured []string // names of the pods with a sample in metrics.k8s.io
	// NotServed is the error that a request to metrics.k8s.io returned, or "".
	NotServed string
}

// claimExplainer explains PersistentVolumeClaims: why a claim is not bound, attached, or expanded.
type claimExplainer struct {
	world *World
}

func (w *World) claims() claimExplainer { return claimExplainer{w} }

// trafficExplainer explains Services, EndpointSlices, and Ingresses: why they have no endpoints.
type trafficExplainer struct {
	world *World
}

func (w *World) traffic() trafficExplainer { return trafficExplainer{w} }

// scalingExplainer explains HorizontalPodAutoscalers: why a HorizontalPodAutoscaler does not scale
// its target.
type scalingExplainer struct {
	world *World
}

func (w *World) scaling() scalingExplainer { return scalingExplainer{w} }

// workloadExplainer explains the controllers of pods: why pods are missing, stuck, or outdated.
type workloadExplainer struct {
	world *World
}

func (w *World) workloads() workloadExplainer { return workloadExplainer{w} }

// placementExplainer explains why no node was chosen for a pod.
type placementExplainer struct {
	world *World
}

func (w *World) placement() placementExplainer { return placementExplainer{w} }

// Names of the lists in World. World.Unread contains the names of the lists that could not be read.
const (
	Events = "events"
	Nodes  = "nodes"
	Pods   = "pods"
	Placed = "pods in all namespaces"
	Claims = "persistentvolumeclaims"

	Budgets     = "poddisruptionbudgets"
	Sets        = "statefulsets"
	Attachments = "volumeattachments"

	ReplicaSets = "replicasets"
	Groups      = "podgroups"
	Mates       = "the pods of the group"
	Schedulers  = "the names of the schedulers that are served"

	Slices   = "endpointslices"
	Services = "services"
	Secrets  = "secrets"
	Classes  = "ingressclasses"

	Target     = "the target"
	PodMetrics = "metrics of pods"
)

// maxDetails is the maximum number of details in a Finding, and of Findings about pods, containers
// or similar parts of the subject.
const maxDetails = 10

// maxEventAge is the maximum age of an event that counts as current.
const maxEventAge = 10 * time.Minute

// Explain returns the report about subject. For a kind without its own explanation, it considers
// only deletion and status conditions.
func Explain(w *World, subject runtime.Object) Report {
	r := Report{Unread: w.Unread, Findings: []Finding{}}
	switch o := subject.(type) {
	case *corev1.Pod:
		r.setSubject("pod", o, w.healthyPodText(o),
			append(w.workloads().explainStuckPods(w.StatefulSet, []corev1.Pod{*o}), w.explainPod(o)...))
	case *appsv1.Deployment:
		r.setSubject("deployment", o, fmt.Sprintf("%d of %d ready", o.Status.ReadyReplicas,
			ptr.Deref(o.Spec.Replicas, 1)), w.workloads().explainDeployment(o))
	case *appsv1.ReplicaSet:
		r.setSubject("replicaset", o, fmt.Sprintf("%d of %d ready", o.Status.ReadyReplicas,
			ptr.Deref(o.Spec.Replicas, 1)), w.workloads().explainReplicaSet(o))
	case *appsv1.StatefulSet:
		r.setSubject("statefulset", o, fmt.Sprintf("%d of %d ready", o.Status.ReadyReplicas,
			ptr.Deref(o.Spec.Replicas, 1)), w.workloads().explainStatefulSet(o))
	case *appsv1.DaemonSet:
		r.setSubject("daemonset", o, fmt.Sprintf("ready on %d of %d nodes", o.Status.NumberReady,
			o.Status.DesiredNumberScheduled), w.workloads().explainDaemonSet(o))
	case *batchv1.Job:
		r.setSubject("job", o, fmt.Sprintf("%d active, %d succeeded", o.Status.Active, o.Status.Succeeded),
			w.workloads().explainJob(o))
	case *corev1.Service:
		r.setSubject("service", o, "its selector, its pods, its endpoints and its ports fit together",
			w.traffic().explainService(o))
		if len(o.Spec.Selector) == 0 {
			r.Well = "it has no selector, so that its endpoints are made by somebody else"
		}
	case *networkingv1.Ingress:
		r.setSubject("ingress", o, w.traffic().healthyIngressText(o), w.traffic().explainIngress(o))
	case *discoveryv1.EndpointSlice:
		r.setSubject("endpointslice", o, fmt.Sprintf("has %s of service %s", countNoun(len(o.Endpoints), "endpoint"),
			o.Labels[discoveryv1.LabelServiceName]), w.traffic().explainEndpointSlice(o))
	case *corev1.PersistentVolumeClaim:
		r.setSubject("persistentvolumeclaim", o, w.claims().healthyClaimText(o), w.claims().explainClaim(o))
	case *certificatesv1.CertificateSigningRequest:
		r.setSubject("certificatesigningrequest", o, "its certificate is issued", w.explainSigningRequest(o))
	case *autoscalingv2.HorizontalPodAutoscaler:
		r.setSubject("horizontalpodautoscaler", o, autoscalerWell(o), w.scaling().explainAutoscaler(o))
	case *corev1.Namespace:
		r.setSubject("namespace", o, string(o.Status.Phase), w.explainNamespace(o))
	case *policyv1.PodDisruptionBudget:
		r.setSubject("poddisruptionbudget", o, fmt.Sprintf("allows %s",
			countNoun(int(o.Status.DisruptionsAllowed), "eviction")), w.explainBudget(o))
	case *corev1.Node:
		r.setSubject("node", o, "Ready", w.explainNode(o))
	default:
		w.explainOther(subject, &r)
	}
	if len(r.Findings) > 0 {
		r.Well = ""
	}
	return r
}

func (r *Report) setSubject(kind string, o metav1.Object, well string, findings []Finding) {
	r.Object, r.Well = objectName(kind, o), well
	r.Findings = append(r.Findings, findings...)
}

func (w *World) hasList(list string) bool { return !slices.Contains(w.Unread, list) }

// ageText returns the time from t to w.Now in kubectl's short form, or "" if t is zero.
func (w *World) ageText(t metav1.Time) string {
	if t.IsZero() {
		return ""
	}
	return shortDuration(w.Now.Sub(t.Time))
}

func objectName(kind string, o metav1.Object) string {
	if o.GetNamespace() == "" {
		return kind + " " + o.GetName()
	}
	return kind + " " + o.GetNamespace() + "/" + o.GetName()
}

// kctlCommand returns a kctl command in the namespace of object o. format and args form the part
// after the namespace. The command is safe to paste into a shell: an argument with characters that
// a shell interprets is replaced by NAME.
func kctlCommand(o metav1.Object, format string, args ...any) string {
	for i, a := range args {
		if text, ok := a.(string); ok {
			args[i] = shellWord(text)
		}
	}
	line := fmt.Sprintf(format, args...)
	if ns := o.GetNamespace(); ns != "" {
		return "kctl -n " + ns + " " + line
	}
	return "kctl " + line
}

// shellWord returns text if it contains no characters that a shell interprets, and "NAME"
// otherwise. Names of some kinds and texts of messages can contain any character.
func shellWord(text string) string {
	if text == "" || strings.ContainsFunc(text, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' ||
			strings.ContainsRune(`._-/:@=,+%" `, r))
	}) {
		return "NAME"
	}
	return text
}

func timeOrNil(t metav1.Time) *metav1.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// newestEvent returns the newest event about the object with that UID and one of the reasons, or
// nil.
func (w *World) newestEvent(uid types.UID, reasons ...string) *corev1.Event {
	var best *corev1.Event
	for i := range w.Events {
		e := &w.Events[i]
		if e.InvolvedObject.UID == uid && slices.Contains(reasons, e.Reason) &&
			(best == nil || lastSeen(best).Before(lastSeen(e))) {
			best = e
		}
	}
	return best
}

// lastSeen returns the time of the last occurrence of an event. It reads the field that the writer
// of the event has set.
func lastSeen(e *corev1.Event) time.Time {
	if e.Series != nil {
		return e.Series.LastObservedTime.Time
	}
	for _, t := range []time.Time{e.LastTimestamp.Time, e.EventTime.Time} {
		if !t.IsZero() {
			return t
		}
	}
	return e.CreationTimestamp.Time
}

// boundList truncates list to the first maxDetails items, and adds an item with the number of
// omitted items.
func boundList(list []string) []string {
	if len(list) <= maxDetails {
		return list
	}
	return append(slices.Clip(list[:maxDetails]), fmt.Sprintf("and %d more", len(list)-maxDetails))
}

// countNoun returns a number with its noun in the singular or plural, such as "1 node" or "2
// nodes".
func countNoun(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// singleLine replaces line breaks and other sequences of white space in a text by single spaces.
func singleLine(text string) string { return strings.Join(strings.Fields(text), " ") }
