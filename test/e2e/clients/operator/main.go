// Command operator is a typical operator, written with controller-runtime: a custom resource in two
// versions with a conversion webhook, a defaulting and a validating webhook, a finalizer, an owned
// Deployment, status and leader election. The operator is a Go module of its own.
package main

import (
	"log"
	"os"

	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
)

func main() {
	ctrl.SetLogger(zap.New())
	if err := runManager(); err != nil {
		log.Fatal(err)
	}
}

func runManager() error {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, addV1, addV1beta1} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	namespace := os.Getenv("NAMESPACE")
	m, err := ctrl.NewManager(ctrl.GetConfigOrDie(), ctrl.Options{
		Scheme:                  scheme,
		Cache:                   cache.Options{DefaultNamespaces: map[string]cache.Config{namespace: {}}},
		Metrics:                 metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress:  ":8081",
		LeaderElection:          true,
		LeaderElectionID:        "shops.example.com",
		LeaderElectionNamespace: namespace,
		WebhookServer:           webhook.NewServer(webhook.Options{Port: 9443, CertDir: "/certs"}),
	})
	if err != nil {
		return err
	}
	if err := m.AddReadyzCheck("webhooks", m.GetWebhookServer().StartedChecker()); err != nil {
		return err
	}
	if err := (&reconciler{m.GetClient()}).addToManager(m); err != nil {
		return err
	}
	if err := ctrl.NewWebhookManagedBy(m, &Shop{}).WithDefaulter(defaulter{}).WithValidator(validator{}).
		Complete(); err != nil {
		return err
	}
	return m.Start(ctrl.SetupSignalHandler())
}
