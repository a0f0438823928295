package api

import (
	"fmt"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	storagev1 "k8s.io/api/storage/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"
)

// Scheme returns a new scheme with every Go type that Keelson serves, nearly all of them in v1
// only. A scheme as large as that of client-go would cost each replica megabytes for versions that
// are not served. The scheme is then read-only and safe for concurrent use: build it once and share
// it.
func Scheme() *runtime.Scheme {
	s := runtime.NewScheme()
	add := []func(*runtime.Scheme) error{
		corev1.AddToScheme, appsv1.AddToScheme, autoscalingv1.AddToScheme, autoscalingv2.AddToScheme,
		batchv1.AddToScheme,
		admissionv1.AddToScheme, admissionregistrationv1.AddToScheme, certificatesv1.AddToScheme,
		flowcontrolv1.AddToScheme, resourcev1.AddToScheme, authenticationv1.AddToScheme, authorizationv1.AddToScheme,
		coordinationv1.AddToScheme, discoveryv1.AddToScheme, eventsv1.AddToScheme,
		networkingv1.AddToScheme, nodev1.AddToScheme, policyv1.AddToScheme, rbacv1.AddToScheme,
		schedulingv1.AddToScheme, storagev1.AddToScheme, metricsv1beta1.AddToScheme,
		metav1.AddMetaToScheme, metav1beta1.AddMetaToScheme, addAPIServiceTypes, addDefinitionTypes, addPodGroupTypes,
	}
	for _, f := range add {
		if err := f(s); err != nil {
			// Two types have the same name, which is a programming error.
			panic(fmt.Sprintf("api: building the scheme: %v", err))
		}
	}
	// Status, the option types and the discovery documents, in version "v1" without a group.
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	return s
}

// Codecs returns the serializers (JSON, YAML, protobuf, each in a strict and a
// lenient form) of a scheme made by Scheme.
func Codecs(s *runtime.Scheme) serializer.CodecFactory { return serializer.NewCodecFactory(s) }

// ParameterCodec decodes query parameters into option types such as metav1.ListOptions.
func ParameterCodec(s *runtime.Scheme) runtime.ParameterCodec { return runtime.NewParameterCodec(s) }

// SetTypeMeta sets apiVersion and kind of obj. Decoders and typed clients leave them empty, and
// every response must have them.
func (k *Kind) SetTypeMeta(obj runtime.Object) {
	obj.GetObjectKind().SetGroupVersionKind(k.GVK)
}

// ListGVK returns the group, version and kind of the kind's list.
func (k *Kind) ListGVK() schema.GroupVersionKind {
	if k.Naming.ListKind != "" {
		return k.GVK.GroupVersion().WithKind(k.Naming.ListKind)
	}
	return k.GVK.GroupVersion().WithKind(k.GVK.Kind + "List")
}

// addAPIServiceTypes registers APIService, without the conversions and defaults that upstream's
// AddToScheme includes.
func addAPIServiceTypes(s *runtime.Scheme) error {
	gv := apiregistrationv1.SchemeGroupVersion
	s.AddKnownTypes(gv, &apiregistrationv1.APIService{}, &apiregistrationv1.APIServiceList{})
	metav1.AddToGroupVersion(s, gv)
	return nil
}

// addPodGroupTypes registers PodGroup and Workload, but not the old PriorityClass of the same
// version.
func addPodGroupTypes(s *runtime.Scheme) error {
	gv := schedulingv1beta1.SchemeGroupVersion
	s.AddKnownTypes(gv, &schedulingv1beta1.PodGroup{}, &schedulingv1beta1.PodGroupList{},
		&schedulingv1beta1.Workload{}, &schedulingv1beta1.WorkloadList{})
	metav1.AddToGroupVersion(s, gv)
	return nil
}

// addDefinitionTypes registers CustomResourceDefinition, without the conversions and defaults that
// upstream's AddToScheme includes.
func addDefinitionTypes(s *runtime.Scheme) error {
	gv := apiextensionsv1.SchemeGroupVersion
	s.AddKnownTypes(gv, &apiextensionsv1.CustomResourceDefinition{}, &apiextensionsv1.CustomResourceDefinitionList{})
	metav1.AddToGroupVersion(s, gv)
	return nil
}
