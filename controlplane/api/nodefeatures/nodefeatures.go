// Package nodefeatures determines which features of a node a pod requires, and which of them a node
// lacks. Agents report their features in status.declaredFeatures of the Node, as kubelets do
// (KEP-5328). An agent of a release without a feature does not report it and would ignore the field
// of the pod. Therefore such pods are not scheduled or bound to its node. All functions are pure.
package nodefeatures

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
)

// Names of features as agents declare them. The names that Kubernetes declares too are equal to
// those of Kubernetes.
const (
	// EphemeralContainers is the support of spec.ephemeralContainers. Kubernetes does not declare
	// it.
	EphemeralContainers = "EphemeralContainers"
	// PodLevelResources is the support of spec.resources. Kubernetes does not declare it.
	PodLevelResources = "PodLevelResources"
	// PodLevelResize is the support of a resize of spec.resources.
	PodLevelResize = "InPlacePodLevelResourcesVerticalScaling"
)

// feature is a feature that pods may require of their node.
type feature struct {
	name string
	// toRun reports whether a node needs the feature to run a pod; nil means never.
	toRun func(spec *corev1.PodSpec) bool
	// toUpdate reports whether a node needs the feature for a change of the pod's spec; nil means
	// never.
	toUpdate func(old, updated *corev1.PodSpec) bool
}

// features are all features that pods may require, in the order of their names.
var features = []feature{
	{name: EphemeralContainers,
		toRun: func(spec *corev1.PodSpec) bool { return len(spec.EphemeralContainers) > 0 },
		toUpdate: func(old, updated *corev1.PodSpec) bool {
			return len(updated.EphemeralContainers) > len(old.EphemeralContainers) // they are only added
		}},
	{name: PodLevelResize, toUpdate: func(old, updated *corev1.PodSpec) bool {
		return !equality.Semantic.DeepEqual(old.Resources, updated.Resources)
	}},
	{name: PodLevelResources, toRun: func(spec *corev1.PodSpec) bool { return spec.Resources != nil }},
}

// RequiredToRun returns the names of the features that a node needs to run a pod with the given
// spec, sorted. It returns nil for most pods.
func RequiredToRun(spec *corev1.PodSpec) []string {
	var names []string
	for i := range features {
		if f := &features[i]; f.toRun != nil && f.toRun(spec) {
			names = append(names, f.name)
		}
	}
	return names
}

// RequiredToUpdate returns the names of the features that the node of a pod needs for the change of
// the pod's spec from old to updated, sorted.
func RequiredToUpdate(old, updated *corev1.PodSpec) []string {
	var names []string
	for i := range features {
		if f := &features[i]; f.toUpdate != nil && f.toUpdate(old, updated) {
			names = append(names, f.name)
		}
	}
	return names
}

// Missing returns the names among required that node does not declare.
func Missing(required []string, node *corev1.Node) []string {
	var names []string
	for _, name := range required {
		if !slices.Contains(node.Status.DeclaredFeatures, name) {
			names = append(names, name)
		}
	}
	return names
}

// List returns feature names as messages show them.
func List(names []string) string { return strings.Join(names, ", ") }
