package podspec

import (
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec/podtable"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// PodKind returns the definition of the kind Pod.
func PodKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "Pod", Plural: "pods", Singular: "pod", Short: []string{"po"},
		InAllCategory: true,
	}, func(l *corev1.PodList) *[]corev1.Pod { return &l.Items })
	k.Deletion.ReturnsDeleted, k.Serving.ShowsTrace = true, true
	k.Writes.Default = builder.Default(defaultPod)
	builder.SeparateStatus(k, func(o *corev1.Pod) *corev1.PodStatus { return &o.Status },
		builder.Accessors[*corev1.Pod]{
			Spec:     func(p *corev1.Pod) any { return p.Spec },
			CopySpec: func(obj, old *corev1.Pod) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *corev1.Pod) {
				// A new pod is Pending, whichever status the client has set.
				obj.Status = corev1.PodStatus{Phase: corev1.PodPending}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				} else if len(obj.Spec.SchedulingGates) > 0 {
					// The scheduler ignores the pod while it has gates, so the reason is set here.
					obj.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled,
						Status:  corev1.ConditionFalse,
						Reason:  corev1.PodReasonSchedulingGated,
						Message: "Scheduling is blocked due to non-empty scheduling gates"}}
				}
			},
		})
	prepare := k.Writes.PrepareCreate
	k.Writes.PrepareCreate = func(o api.Object) {
		prepare(o)
		mergeLabelKeys(o.(*corev1.Pod))
		syncAppArmor(o.(*corev1.Pod))
		defaultGracePeriod(&o.(*corev1.Pod).Spec)
	}
	builder.AddValidation(k, validatePod)
	k.Validation.Create = builder.CreateValidation(func(p *corev1.Pod) field.ErrorList {
		return slices.Concat(validateSeccompMatch(p), validateApparmorMatch(p), forbidEphemeralContainers(p))
	})
	builder.AddUpdateValidation(k, validatePodUpdate)
	status := k.Subresources["status"]
	keepSpec := status.PrepareUpdate
	status.PrepareUpdate = func(obj, old api.Object) {
		keepSpec(obj, old)
		// A node cannot change a pod's owners.
		obj.SetOwnerReferences(old.GetOwnerReferences())
		prepareStatus(&obj.(*corev1.Pod).Status, &old.(*corev1.Pod).Status)
	}
	validateMeta := status.ValidateUpdate
	status.ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		pod, previous := obj.(*corev1.Pod), old.(*corev1.Pod)
		return slices.Concat(validateMeta(obj, old), validateMetaUpdate(pod, previous),
			validatePodStatusUpdate(pod, previous))
	}
	addPodSubresources(k)
	k.Deletion.GracePeriod = func(o api.Object, requested *int64) int64 {
		return PodGracePeriod(o.(*corev1.Pod), requested)
	}
	k.Lists.Columns = podtable.Columns
	k.Lists.Row = builder.Row(podtable.Row)
	k.Storage.Index = &api.Index{Field: "spec.nodeName",
		Of: func(o api.Object) string { return o.(*corev1.Pod).Spec.NodeName }}
	k.Lists.Fields = builder.Fields(func(p *corev1.Pod) fields.Set {
		return fields.Set{
			"spec.nodeName":            p.Spec.NodeName,
			"spec.restartPolicy":       string(p.Spec.RestartPolicy),
			"spec.schedulerName":       p.Spec.SchedulerName,
			"spec.serviceAccountName":  p.Spec.ServiceAccountName,
			"spec.hostNetwork":         strconv.FormatBool(p.Spec.HostNetwork),
			"status.phase":             string(p.Status.Phase),
			"status.podIP":             p.Status.PodIP,
			"status.podIPs":            "", // Kubernetes accepts the field name, but matches no pod
			"status.nominatedNodeName": p.Status.NominatedNodeName,
		}
	})
	return k
}

func addPodSubresources(k *api.Kind) {
	core := corev1.SchemeGroupVersion
	create := []string{"create"}
	connect := []string{"create", "get"}
	builder.AddSubresource(k, "binding", &api.Subresource{GVK: core.WithKind("Binding"), Verbs: create,
		New: func() runtime.Object { return &corev1.Binding{} }})
	builder.AddSubresource(k, "eviction", &api.Subresource{GVK: policyv1.SchemeGroupVersion.WithKind("Eviction"),
		Verbs: create,
		New:   func() runtime.Object { return &policyv1.Eviction{} }})
	builder.AddSubresource(k, "log", &api.Subresource{GVK: k.GVK, Verbs: []string{"get"}})
	builder.AddSubresource(k, "exec", &api.Subresource{GVK: core.WithKind("PodExecOptions"), Verbs: connect})
	builder.AddSubresource(k, "attach", &api.Subresource{GVK: core.WithKind("PodAttachOptions"), Verbs: connect})
	builder.AddSubresource(k, "portforward", &api.Subresource{GVK: core.WithKind("PodPortForwardOptions"),
		Verbs: connect})
	builder.AddSubresource(k, "proxy", &api.Subresource{GVK: core.WithKind("PodProxyOptions"),
		Verbs: builder.ProxyVerbs})
	builder.AddSubresource(k, "ephemeralcontainers", &api.Subresource{
		Verbs:       []string{"get", "patch", "update"},
		OwnedFields: []string{"spec.ephemeralContainers"},
		PrepareUpdate: func(o, was api.Object) {
			obj, old := o.(*corev1.Pod), was.(*corev1.Pod)
			want := obj.Spec.EphemeralContainers
			rv := obj.ResourceVersion
			*obj = *old.DeepCopy()
			obj.ResourceVersion = rv
			obj.Spec.EphemeralContainers = want
			DefaultPodSpec(&obj.Spec)
			if !fieldrules.SemanticEqual(want, old.Spec.EphemeralContainers) {
				obj.Generation++
			}
		},
		ValidateUpdate: func(o, was api.Object) field.ErrorList {
			obj, old := o.(*corev1.Pod), was.(*corev1.Pod)
			if _, mirror := old.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
				return field.ErrorList{field.Forbidden(field.NewPath(""),
					"static pods do not support ephemeral containers")}
			}
			return slices.Concat(builder.ValidateMetaUpdate(obj, old), k.ValidateObject(obj, old),
				validateMetaUpdate(obj, old),
				validateEphemeralUpdate(obj, old))
		},
	})
	builder.AddSubresource(k, "resize", &api.Subresource{
		Verbs:         []string{"get", "patch", "update"},
		PrepareUpdate: func(obj, old api.Object) { keepAllButResources(obj.(*corev1.Pod), old.(*corev1.Pod)) },
		ValidateUpdate: func(o, was api.Object) field.ErrorList {
			obj, old := o.(*corev1.Pod), was.(*corev1.Pod)
			if errs := validateResizable(old); len(errs) > 0 {
				return errs
			}
			return slices.Concat(builder.ValidateMetaUpdate(obj, old), k.ValidateObject(obj, old),
				validateResize(obj, old))
		},
	})
}

// defaultGracePeriod replaces a negative grace period of a pod with one second, as Kubernetes
// interprets it. Pod templates keep the negative value, because their hash must not change.
func defaultGracePeriod(spec *corev1.PodSpec) {
	if g := spec.TerminationGracePeriodSeconds; g != nil && *g < 0 {
		*g = 1
	}
}

// PodGracePeriod returns the grace period of a pod's deletion in seconds. It is 0 if no container
// of the pod can be running. Otherwise it is the requested period, or else the pod's
// terminationGracePeriodSeconds.
func PodGracePeriod(pod *corev1.Pod, requested *int64) int64 {
	if pod.Spec.NodeName == "" || api.IsPodTerminal(pod) {
		return 0
	}
	period := DefaultGracePeriodSeconds
	if requested != nil {
		period = *requested
	} else if pod.Spec.TerminationGracePeriodSeconds != nil {
		period = *pod.Spec.TerminationGracePeriodSeconds
	}
	if period < 0 {
		return 1
	}
	return period
}

// QOSClass returns the QoS class of a pod. If the pod has resources of its own, only these count;
// otherwise those of its containers. The class is Guaranteed if all of them have limits for CPU and
// memory and equal requests, and BestEffort if none of them has requests or limits. Otherwise it is
// Burstable.
func QOSClass(spec *corev1.PodSpec) corev1.PodQOSClass {
	var lists []*corev1.ResourceRequirements
	if spec.Resources != nil {
		lists = append(lists, spec.Resources)
	} else {
		for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
			for i := range containers {
				lists = append(lists, &containers[i].Resources)
			}
		}
	}
	guaranteed, asks := true, false
	for _, r := range lists {
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
			limit, limited := r.Limits[name]
			request, requested := r.Requests[name]
			asks = asks || limited && !limit.IsZero() || requested && !request.IsZero()
			if !limited || limit.IsZero() || requested && limit.Cmp(request) != 0 {
				guaranteed = false
			}
		}
	}
	switch {
	case !asks:
		return corev1.PodQOSBestEffort
	case guaranteed:
		return corev1.PodQOSGuaranteed
	}
	return corev1.PodQOSBurstable
}
