// Command wget fetches a URL, with the options of busybox's wget. The example image of tools has it
// instead, because the static busybox of Debian crashes on -T, the timeout, which network tests
// need.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

type options struct {
	quiet, spider, showHeaders, insecure bool
	output, postData, agent              string
	headers                              []string
	timeout                              int // seconds; 0 = none
}

func main() {
	var o options
	f := pflag.NewFlagSet("wget", pflag.ContinueOnError)
	f.BoolVarP(&o.quiet, "quiet", "q", false, "print errors only")
	f.BoolVar(&o.spider, "spider", false, "only check that the URL exists")
	f.BoolVarP(&o.showHeaders, "server-response", "S", false, "print the headers of the response")
	f.BoolVar(&o.insecure, "no-check-certificate", false, "accept any certificate")
	f.StringVarP(&o.output, "output-document", "O", "", "file for the response; - = standard output")
	f.StringVar(&o.postData, "post-data", "", "send this text as the body of a POST request")
	f.StringVarP(&o.agent, "user-agent", "U", "Wget", "value of the User-Agent header")
	f.StringArrayVar(&o.headers, "header", nil, "header to send, as NAME: VALUE (repeatable)")
	f.IntVarP(&o.timeout, "timeout", "T", 900, "timeout in seconds; 0 = none")
	err := f.Parse(os.Args[1:])
	if err == nil && f.NArg() != 1 {
		err = errors.New("want one URL: wget [-qS] [-O FILE] [-T SECONDS] URL")
	}
	if err == nil {
		err = fetchURL(o, f.Arg(0))
	}
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "wget:", err)
		os.Exit(1)
	}
}

func fetchURL(o options, address string) error {
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	ctx := context.Background()
	if o.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(o.timeout)*time.Second)
		defer cancel()
	}
	req, err := o.newRequest(ctx, address)
	if err != nil {
		return err
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: o.insecure} // requested by -no-check-certificate
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return describeError(req.URL, err)
	}
	defer resp.Body.Close()
	if o.showHeaders {
		fmt.Fprintf(os.Stderr, "  %s %s\n", resp.Proto, resp.Status)
		_ = resp.Header.Write(os.Stderr)
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("server returned error: %s %s", resp.Proto, resp.Status)
	}
	if o.spider {
		return nil
	}
	out, name, err := o.openOutput(req.URL)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, resp.Body)
	if err := errors.Join(err, out.Close()); err != nil {
		return describeError(req.URL, err)
	}
	if !o.quiet && name != "-" {
		fmt.Fprintf(os.Stderr, "'%s' saved\n", name)
	}
	return nil
}

func (o options) newRequest(ctx context.Context, address string) (*http.Request, error) {
	method, body := http.MethodGet, io.Reader(nil)
	switch {
	case o.postData != "":
		method, body = http.MethodPost, strings.NewReader(o.postData)
	case o.spider:
		method = http.MethodHead
	}
	req, err := http.NewRequestWithContext(ctx, method, address, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("User-Agent", o.agent)
	if body != nil {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for _, h := range o.headers {
		name, value, ok := strings.Cut(h, ":")
		if !ok {
			return nil, fmt.Errorf("--header %q: want NAME: VALUE", h)
		}
		if value = strings.TrimSpace(value); strings.EqualFold(name, "Host") {
			req.Host = value
		} else {
			req.Header.Set(name, value)
		}
	}
	return req, nil
}

func (o options) openOutput(u *url.URL) (io.WriteCloser, string, error) {
	if o.output == "-" {
		return os.Stdout, "-", nil
	}
	name := o.output
	if name == "" {
		if name = path.Base(u.Path); name == "." || name == "/" {
			name = "index.html"
		}
	}
	f, err := os.Create(name)
	return f, name, err
}

// describeError returns the error in the words of busybox, which scripts expect: an unresolved
// name, a timeout.
func describeError(u *url.URL, err error) error {
	var dns *net.DNSError
	var wrapped *url.Error
	switch {
	case errors.As(err, &dns):
		return fmt.Errorf("bad address '%s': %v", u.Hostname(), dns.Err)
	case errors.Is(err, context.DeadlineExceeded):
		return errors.New("download timed out")
	case errors.As(err, &wrapped):
		return fmt.Errorf("can't connect to remote host: %w", wrapped.Err)
	}
	return err
}
