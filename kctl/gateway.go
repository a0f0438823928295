package kctl

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/dynamic"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/kctl/definitions"
)

// gatewayController is the controllerName of GatewayClasses that the control plane serves.
const gatewayController = "keelson.dev/gateway"

// mostInstalling bounds the installation of kinds.
const mostInstalling = time.Minute

var gatewayClasses = schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "gatewayclasses"}

func gatewayCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:     "gateway",
		Short:   "Gateway API: HTTP and gRPC from outside of the cluster",
		Example: "  kctl gateway install",
	}
	return group(c, gatewayInstallCommand(f, streams))
}

func gatewayInstallCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "install",
		Short: "Have the cluster serve Gateway API, with a class of its own",
		Long: "Have the cluster serve the kinds of Gateway API " + definitions.Gateway.Release + " (GatewayClass, Gateway, HTTPRoute, GRPCRoute,\n" +
			"ReferenceGrant) and make a GatewayClass of Keelson's own controller. Definitions that the cluster has in a newer\n" +
			"release or another channel stay as they are; older ones of the standard channel are replaced. It may be run again.\n\n" +
			"'kctl delete crd' takes a kind away again, with all its objects.",
		Example: "  kctl gateway install\n  kctl gateway install --class public\n  kctl gateway install --class ''   # the kinds alone",
		Args:    cobra.NoArgs,
	}
	class := c.Flags().String("class", "keelson", "the name of the GatewayClass; an empty one makes none")
	c.RunE = func(*cobra.Command, []string) error {
		ctx, cancel := interruptible()
		defer cancel()
		ctx, cancel = context.WithTimeout(ctx, mostInstalling)
		defer cancel()
		cluster, err := f.DynamicClient()
		if err != nil {
			return err
		}
		err = definitions.Gateway.Install(ctx, cluster, func(o definitions.Outcome) {
			fmt.Fprintf(streams.Out, "customresourcedefinition/%s %s", o.Name, o.Verdict)
			if o.Reason != "" {
				fmt.Fprintf(streams.Out, ": %s", o.Reason)
			}
			fmt.Fprintln(streams.Out)
		})
		if err != nil || *class == "" {
			return err
		}
		return makeGatewayClass(ctx, cluster, streams, *class)
	}
	return c
}

// makeGatewayClass makes the class unless it is there. A replica may serve a new kind a little later than another.
func makeGatewayClass(ctx context.Context, cluster dynamic.Interface, streams genericiooptions.IOStreams, name string) error {
	class := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": gatewayClasses.GroupVersion().String(), "kind": "GatewayClass",
		"metadata": map[string]any{"name": name},
		"spec":     map[string]any{"controllerName": gatewayController},
	}}
	var refused error
	err := wait.For(ctx, 100*time.Millisecond, func() error {
		_, err := cluster.Resource(gatewayClasses).Create(ctx, class, metav1.CreateOptions{})
		if apierrors.IsNotFound(err) {
			return err
		}
		refused = err
		return nil
	})
	if err == nil {
		err = refused
	}
	switch {
	case err == nil:
		fmt.Fprintf(streams.Out, "gatewayclass/%s created\n", name)
		return nil
	case !apierrors.IsAlreadyExists(err):
		return fmt.Errorf("making GatewayClass %s: %w", name, err)
	}
	have, err := cluster.Resource(gatewayClasses).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("reading GatewayClass %s: %w", name, err)
	}
	if by, _, _ := unstructured.NestedString(have.Object, "spec", "controllerName"); by != gatewayController {
		return fmt.Errorf("GatewayClass %s is served by controller %q: choose another name with --class", name, by)
	}
	fmt.Fprintf(streams.Out, "gatewayclass/%s unchanged\n", name)
	return nil
}
