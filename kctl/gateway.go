package kctl

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/dynamic"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/kctl/definitions"
	"keelson.dev/keelson/kctl/verb"
)

// gatewayController is the spec.controllerName of the GatewayClasses that Keelson's control plane
// serves.
const gatewayController = "keelson.dev/gateway"

var gatewayClasses = schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1",
	Resource: "gatewayclasses"}

func gatewayCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:     "gateway",
		Short:   "Manage Gateway API: HTTP and gRPC routes from outside the cluster",
		Example: "  kctl gateway install",
	}
	return verb.NewGroup(c, gatewayInstallCommand(f, streams))
}

func gatewayInstallCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "install",
		Short: "Install the kinds of Gateway API and a GatewayClass",
		Long: "Install the CustomResourceDefinitions of Gateway API " +
			definitions.Gateway.Release +
			" (GatewayClass, Gateway,\n" +
			"HTTPRoute, GRPCRoute, ReferenceGrant), and create a GatewayClass of Keelson's controller.\n" +
			"An existing definition of a newer release or of another channel is not changed. An older one of\n" +
			"the standard channel is upgraded. The command can be run again.\n" +
			"\n" +
			"'kctl delete crd' deletes a kind and all of its objects.",
		Example: "  kctl gateway install\n" +
			"  kctl gateway install --class public\n" +
			"\n" +
			"  # Install the kinds without a GatewayClass\n" +
			"  kctl gateway install --class ''",
	}
	return addInstall(c, f, streams, definitions.Gateway, "keelson", "the GatewayClass",
		func(ctx context.Context, cluster dynamic.Interface, class string) error {
			return createGatewayClass(ctx, cluster, streams, class)
		})
}

// createGatewayClass creates a GatewayClass of Keelson's controller, unless it exists, and prints
// the result. It fails if the existing GatewayClass belongs to another controller.
func createGatewayClass(
	ctx context.Context, cluster dynamic.Interface, streams genericiooptions.IOStreams, name string,
) error {
	class := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": gatewayClasses.GroupVersion().String(), "kind": "GatewayClass",
		"metadata": map[string]any{"name": name},
		"spec":     map[string]any{"controllerName": gatewayController},
	}}
	return createClass(ctx, cluster, streams, gatewayClasses, class, func() error {
		have, err := cluster.Resource(gatewayClasses).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("reading GatewayClass %s: %w", name, err)
		}
		if by, _, _ := unstructured.NestedString(have.Object, "spec", "controllerName"); by != gatewayController {
			return fmt.Errorf("GatewayClass %s is served by controller %q: choose another name with --class", name, by)
		}
		return nil
	})
}
