package main

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/conversion"
)

const group = "example.com"

// Shop is the storage version.
type Shop struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              ShopSpec   `json:"spec,omitempty"`
	Status            ShopStatus `json:"status,omitempty"`
}

type ShopSpec struct {
	Replicas int32  `json:"replicas"`
	Greeting string `json:"greeting,omitempty"`
}

type ShopStatus struct {
	ReadyReplicas int32  `json:"readyReplicas"`
	Leader        string `json:"leader,omitempty"`
}

type ShopList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Shop `json:"items"`
}

// ShopV1beta1 is the older version: its number of replicas is called size.
type ShopV1beta1 struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              struct {
		Size     int32  `json:"size"`
		Greeting string `json:"greeting,omitempty"`
	} `json:"spec,omitempty"`
	Status ShopStatus `json:"status,omitempty"`
}

func (s *Shop) Hub() {}

func (s *ShopV1beta1) ConvertTo(to conversion.Hub) error {
	hub, ok := to.(*Shop)
	if !ok {
		return fmt.Errorf("a %T is not a Shop", to)
	}
	hub.ObjectMeta, hub.Status = s.ObjectMeta, s.Status
	hub.Spec = ShopSpec{Replicas: s.Spec.Size, Greeting: s.Spec.Greeting}
	return nil
}

func (s *ShopV1beta1) ConvertFrom(from conversion.Hub) error {
	hub, ok := from.(*Shop)
	if !ok {
		return fmt.Errorf("a %T is not a Shop", from)
	}
	s.ObjectMeta, s.Status = hub.ObjectMeta, hub.Status
	s.Spec.Size, s.Spec.Greeting = hub.Spec.Replicas, hub.Spec.Greeting
	return nil
}

func (s *Shop) DeepCopyObject() runtime.Object {
	out := *s
	s.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	return &out
}

func (s *ShopV1beta1) DeepCopyObject() runtime.Object {
	out := *s
	s.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	return &out
}

func (l *ShopList) DeepCopyObject() runtime.Object {
	out := *l
	l.ListMeta.DeepCopyInto(&out.ListMeta)
	out.Items = make([]Shop, len(l.Items))
	for i := range l.Items {
		out.Items[i] = *l.Items[i].DeepCopyObject().(*Shop)
	}
	return &out
}

func addV1(s *runtime.Scheme) error {
	gv := schema.GroupVersion{Group: group, Version: "v1"}
	s.AddKnownTypes(gv, &Shop{}, &ShopList{})
	metav1.AddToGroupVersion(s, gv)
	return nil
}

func addV1beta1(s *runtime.Scheme) error {
	gv := schema.GroupVersion{Group: group, Version: "v1beta1"}
	s.AddKnownTypeWithName(gv.WithKind("Shop"), &ShopV1beta1{})
	metav1.AddToGroupVersion(s, gv)
	return nil
}
