package kctl

import (
	"context"
	"fmt"
	"strings"
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

// mostInstalling bounds the installation of kinds.
const mostInstalling = time.Minute

// installs has a command make the cluster serve kinds, tell of each, and then make what then does: classes, of a name that a
// flag gives.
func installs(c *cobra.Command, f cmdutil.Factory, streams genericiooptions.IOStreams, kinds definitions.Bundle, name, classes string,
	then func(ctx context.Context, cluster dynamic.Interface, name string) error) *cobra.Command {
	class := c.Flags().String("class", name, "name of "+classes+" to create; if empty, none is created")
	c.Args = cobra.NoArgs
	c.RunE = func(*cobra.Command, []string) error {
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
		if err != nil || *class == "" {
			return err
		}
		return then(ctx, cluster, *class)
	}
	return c
}

// makeClass makes a class unless it is there; one that is there may be refused.
func makeClass(ctx context.Context, cluster dynamic.Interface, streams genericiooptions.IOStreams, kind schema.GroupVersionResource,
	class *unstructured.Unstructured, refuse func() error) error {
	err := createServed(ctx, cluster, kind, class)
	verdict := "created"
	if apierrors.IsAlreadyExists(err) {
		verdict, err = "unchanged", refuse()
	} else if err != nil {
		err = fmt.Errorf("creating %s %s: %w", class.GetKind(), class.GetName(), err)
	}
	if err == nil {
		fmt.Fprintf(streams.Out, "%s/%s %s\n", strings.ToLower(class.GetKind()), class.GetName(), verdict)
	}
	return err
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
