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
	"keelson.dev/keelson/kctl/verb"
)

// installTimeout is the time limit of 'kctl gateway install' and 'kctl snapshot install'.
const installTimeout = time.Minute

// addInstall makes c a command that installs the CustomResourceDefinitions in kinds, prints the
// result for each, and then calls createClasses. It adds the flag --class for the name of the
// classes to create, with the default defaultName. If --class is empty, createClasses is not
// called. classText describes the classes in the help of --class.
func addInstall(c *cobra.Command, f cmdutil.Factory, streams genericiooptions.IOStreams, kinds definitions.Bundle,
	defaultName, classText string,
	createClasses func(ctx context.Context, cluster dynamic.Interface, name string) error) *cobra.Command {
	class := c.Flags().String("class", defaultName, "name of "+classText+" to create; if empty, none is created")
	c.Args = cobra.NoArgs
	c.RunE = func(*cobra.Command, []string) error {
		ctx, cancel := verb.WithSignals()
		defer cancel()
		ctx, cancel = context.WithTimeout(ctx, installTimeout)
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
		return createClasses(ctx, cluster, *class)
	}
	return c
}

// createClass creates class, an object of a cluster-scoped kind such as GatewayClass, and prints
// the result. If an object of that name exists, it calls checkExisting and returns its error. If
// checkExisting returns nil, the existing object is accepted.
func createClass(ctx context.Context, cluster dynamic.Interface, streams genericiooptions.IOStreams,
	kind schema.GroupVersionResource,
	class *unstructured.Unstructured, checkExisting func() error) error {
	err := createWhenServed(ctx, cluster, kind, class)
	verdict := "created"
	if apierrors.IsAlreadyExists(err) {
		verdict, err = "unchanged", checkExisting()
	} else if err != nil {
		err = fmt.Errorf("creating %s %s: %w", class.GetKind(), class.GetName(), err)
	}
	if err == nil {
		fmt.Fprintf(streams.Out, "%s/%s %s\n", strings.ToLower(class.GetKind()), class.GetName(), verdict)
	}
	return err
}

// createWhenServed creates o, an object of a cluster-scoped kind. It retries until the API server
// serves the kind, or until ctx is done. Replicas start to serve a new kind at different times.
func createWhenServed(
	ctx context.Context, cluster dynamic.Interface, kind schema.GroupVersionResource, o *unstructured.Unstructured,
) error {
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
