package kctl

import (
	"context"
	"fmt"
	"time"

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

// mostInstalling bounds the installation of kinds.
const mostInstalling = time.Minute

// installKinds has the cluster serve kinds, tells of each, and then makes what then does.
func installKinds(f cmdutil.Factory, streams genericiooptions.IOStreams, kinds definitions.Bundle, then func(context.Context, dynamic.Interface) error) error {
	ctx, cancel := interruptible()
	defer cancel()
	ctx, cancel = context.WithTimeout(ctx, mostInstalling)
	defer cancel()
	cluster, err := f.DynamicClient()
	if err != nil {
		return err
	}
	err = kinds.Install(ctx, cluster, func(o definitions.Outcome) {
		fmt.Fprintf(streams.Out, "customresourcedefinition/%s %s", o.Name, o.Verdict)
		if o.Reason != "" {
			fmt.Fprintf(streams.Out, ": %s", o.Reason)
		}
		fmt.Fprintln(streams.Out)
	})
	if err != nil {
		return err
	}
	return then(ctx, cluster)
}

// createServed creates an object without a namespace as soon as its kind is served: one replica may serve a new kind a little
// later than another.
func createServed(ctx context.Context, cluster dynamic.Interface, kind schema.GroupVersionResource, o *unstructured.Unstructured) error {
	var refused error
	err := wait.For(ctx, 100*time.Millisecond, func() error {
		_, err := cluster.Resource(kind).Create(ctx, o, metav1.CreateOptions{})
		if apierrors.IsNotFound(err) {
			return err
		}
		refused = err
		return nil
	})
	if err != nil {
		return err
	}
	return refused
}
