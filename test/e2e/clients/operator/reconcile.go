package main

import (
	"context"
	"fmt"
	"os"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
)

const finalizer = group + "/receipt"

type reconciler struct{ client.Client }

func (r *reconciler) addToManager(m ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(m).For(&Shop{}).Owns(&appsv1.Deployment{}).Complete(r)
}

// Reconcile creates the Deployment of a Shop and stores the number of ready pods in its status.
// When a Shop is deleted, Reconcile creates a ConfigMap as a receipt.
func (r *reconciler) Reconcile(ctx context.Context, q ctrl.Request) (ctrl.Result, error) {
	shop := &Shop{}
	if err := r.Get(ctx, q.NamespacedName, shop); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !shop.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, r.finalize(ctx, shop)
	}
	if controllerutil.AddFinalizer(shop, finalizer) {
		return ctrl.Result{}, r.Update(ctx, shop)
	}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: shop.Namespace, Name: shop.Name}}
	_, err := controllerutil.CreateOrUpdate(ctx, r.Client, d, func() error {
		labels := map[string]string{"shop": shop.Name}
		d.Spec.Replicas = &shop.Spec.Replicas
		d.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
		d.Spec.Template.Labels = labels
		c := corev1.Container{Name: "main", Image: "keelson.dev/hello:v1"}
		if len(d.Spec.Template.Spec.Containers) > 0 {
			c = d.Spec.Template.Spec.Containers[0]
		}
		c.Env = []corev1.EnvVar{{Name: "GREETING", Value: shop.Spec.Greeting}}
		d.Spec.Template.Spec.Containers = []corev1.Container{c}
		return controllerutil.SetControllerReference(shop, d, r.Scheme())
	})
	if err != nil {
		return ctrl.Result{}, err
	}
	status := ShopStatus{ReadyReplicas: d.Status.ReadyReplicas, Leader: os.Getenv("POD")}
	if shop.Status != status {
		shop.Status = status
		return ctrl.Result{}, r.Status().Update(ctx, shop)
	}
	return ctrl.Result{}, nil
}

func (r *reconciler) finalize(ctx context.Context, shop *Shop) error {
	receipt := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: shop.Namespace, Name: shop.Name + "-receipt"}}
	if err := r.Create(ctx, receipt); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	if controllerutil.RemoveFinalizer(shop, finalizer) {
		return r.Update(ctx, shop)
	}
	return nil
}

type defaulter struct{}

func (defaulter) Default(_ context.Context, s *Shop) error {
	if s.Spec.Greeting == "" {
		s.Spec.Greeting = "hello from " + s.Name
	}
	return nil
}

type validator struct{}

func (validator) ValidateCreate(_ context.Context, s *Shop) (admission.Warnings, error) {
	if s.Spec.Replicas == 0 {
		return admission.Warnings{"a shop without replicas is closed"}, nil
	}
	return nil, validateShop(s)
}

func (validator) ValidateUpdate(_ context.Context, old, s *Shop) (admission.Warnings, error) {
	if old.Spec.Greeting != s.Spec.Greeting {
		return nil, fmt.Errorf("spec.greeting of a shop is immutable")
	}
	return nil, validateShop(s)
}

func (validator) ValidateDelete(_ context.Context, s *Shop) (admission.Warnings, error) {
	if s.Annotations[group+"/keep"] != "" {
		return nil, fmt.Errorf("the annotation %s/keep keeps the shop", group)
	}
	return nil, nil
}

func validateShop(s *Shop) error {
	if s.Spec.Replicas > 3 {
		return fmt.Errorf("spec.replicas: a shop has at most 3, not %d", s.Spec.Replicas)
	}
	return nil
}
