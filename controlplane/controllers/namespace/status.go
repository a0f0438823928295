// Package namespace deletes the contents of terminating namespaces and then finalizes them.
package namespace

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// Content holds the objects of one kind that still exist in a terminating namespace.
type Content struct {
	Resource string // resource and API group, such as "configmaps" or "deployments.apps"
	Objects  []api.Object
}

// namesShown is the maximum number of remaining objects that a condition names.
const namesShown = 3

// TerminatingStatus returns the status of a terminating namespace. Its conditions show why the
// namespace still exists, with the names of remaining objects and their finalizers.
func TerminatingStatus(ns *corev1.Namespace, left []Content, failures []error, now time.Time) corev1.NamespaceStatus {
	s := *ns.Status.DeepCopy()
	s.Phase = corev1.NamespaceTerminating
	set := func(t corev1.NamespaceConditionType, bad bool, reason, message string) {
		c := corev1.NamespaceCondition{Type: t, Status: corev1.ConditionFalse, Reason: reason, Message: message,
			LastTransitionTime: metav1.NewTime(now)}
		if bad {
			c.Status = corev1.ConditionTrue
		}
		i := slices.IndexFunc(s.Conditions, func(h corev1.NamespaceCondition) bool { return h.Type == t })
		if i < 0 {
			s.Conditions = append(s.Conditions, c)
			return
		}
		if s.Conditions[i].Status == c.Status {
			c.LastTransitionTime = s.Conditions[i].LastTransitionTime
		}
		s.Conditions[i] = c
	}
	unknown := slices.IndexFunc(failures, isDiscoveryFailure)
	if unknown >= 0 {
		set(corev1.NamespaceDeletionDiscoveryFailure, true, "DiscoveryFailed", failures[unknown].Error())
		failures = slices.DeleteFunc(slices.Clone(failures), isDiscoveryFailure)
	} else {
		set(corev1.NamespaceDeletionDiscoveryFailure, false, "ResourcesDiscovered",
			"All resources successfully discovered")
	}
	set(corev1.NamespaceDeletionGVParsingFailure, false, "ParsedGroupVersions",
		"All legacy kube types successfully parsed")
	if len(failures) > 0 {
		var all []string
		for _, f := range failures {
			all = append(all, f.Error())
		}
		set(corev1.NamespaceDeletionContentFailure, true, "ContentDeletionFailed",
			"Failed to delete all resource types, "+
				fmt.Sprintf("%d remaining: %s", len(failures), strings.Join(all, ", ")))
	} else {
		set(corev1.NamespaceDeletionContentFailure, false, "ContentDeleted",
			"All content successfully deleted, may be waiting on finalization")
	}
	if remaining := describeContents(left); remaining != "" {
		set(corev1.NamespaceContentRemaining, true, "SomeResourcesRemain", "Some resources are remaining: "+remaining)
	} else {
		set(corev1.NamespaceContentRemaining, false, "ContentRemoved", "All content successfully removed")
	}
	if finalizers := describeFinalizers(left); finalizers != "" {
		set(corev1.NamespaceFinalizersRemaining, true, "SomeFinalizersRemain",
			"Some content in the namespace has finalizers remaining: "+finalizers)
	} else {
		set(corev1.NamespaceFinalizersRemaining, false, "ContentHasNoFinalizers",
			"All content-preserving finalizers finished")
	}
	return s
}

// describeContents returns the number and the names of the remaining objects: "configmaps. has 1
// resource instances (settings)".
func describeContents(remaining []Content) string {
	var parts []string
	for _, c := range remaining {
		if len(c.Objects) == 0 {
			continue
		}
		resource := c.Resource
		if !strings.Contains(resource, ".") {
			resource += "."
		}
		parts = append(parts, fmt.Sprintf("%s has %d resource instances (%s)", resource, len(c.Objects),
			joinNames(c.Objects)))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}

func joinNames(objs []api.Object) string {
	var out []string
	for _, o := range objs {
		out = append(out, o.GetName())
	}
	slices.Sort(out)
	if len(out) > namesShown {
		out = append(out[:namesShown], "...")
	}
	return strings.Join(out, ", ")
}

// describeFinalizers returns, for each finalizer, the number of remaining objects that have it.
func describeFinalizers(remaining []Content) string {
	count := map[string]int{}
	for _, c := range remaining {
		for _, o := range c.Objects {
			for _, f := range o.GetFinalizers() {
				count[f]++
			}
		}
	}
	var parts []string
	for f, n := range count {
		parts = append(parts, fmt.Sprintf("%s in %d resource instances", f, n))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}
